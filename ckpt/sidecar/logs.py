"""Record logs: appended to by one worker, copied to the next node, read after its death.

A log is a file of length- and checksum-framed records in the arena directory; it outlives the
worker, and a crash of this sidecar. Its copy on the next node of the group outlives the node.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ckpt.errors import CapacityError, CkptError, NotFoundError, PeerError
from ckpt.isal import crc32c
from ckpt.sidecar.core import Core, Op, Work
from ckpt.sidecar.exchange import Exchange, is_passing
from ckpt.sidecar.messages import LogContents, LogCopy, LogName, LogTruncate, unparse
from ckpt.sidecar.wire import PART_BYTES
from ckpt.transport import Client, Request
from ckpt.types import Json, learn
from ckpt.world import SidecarPeer, SnapshotWorld

ASK_TIMEOUT_S = 1.5
MAX_LOG_BYTES = 256 << 20
_SUFFIX = ".log"
_FRAME = struct.Struct("<II")


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """First record of a log file."""

    name: str
    node: str
    base: int


@dataclass(slots=True, kw_only=True, eq=False)
class RecordLog:
    """Records ``base …`` of a log; ``copied`` is up to where the next node has them."""

    name: str
    node: str
    path: Path
    base: int = 0
    records: list[bytes] = field(default_factory=list)
    nbytes: int = 0
    copied: int = 0
    sending: bool = False

    @property
    def end(self) -> int:
        """Index of the next record."""
        return self.base + len(self.records)

    def append(self, records: Sequence[bytes]) -> None:
        """Add records. Raises ``CapacityError`` when the log would outgrow its bound."""
        size = sum(map(len, records))
        if self.nbytes + size > MAX_LOG_BYTES:
            raise CapacityError(
                f"log {self.name!r} holds {self.nbytes:,} bytes and may hold {MAX_LOG_BYTES:,}: "
                "truncate what has been consumed"
            )
        self._append_to(self.path, records)
        self.records += records
        self.nbytes += size

    def truncate(self, keep_from: int) -> None:
        """Drop the records before ``keep_from``."""
        count = min(max(keep_from - self.base, 0), len(self.records))
        if keep_from <= self.base:
            return
        self.nbytes -= sum(map(len, self.records[:count]))
        self.records = self.records[count:]
        self.base = keep_from
        self.rewrite()

    def rewrite(self) -> None:
        """Replace the file: the head, then the records. One that was there stays until then."""
        head = msgspec.json.encode(_Head(name=self.name, node=self.node, base=self.base))
        fresh = self.path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        try:
            self._append_to(fresh, [head, *self.records])
            fresh.replace(self.path)
        finally:
            fresh.unlink(missing_ok=True)

    def _append_to(self, path: Path, records: Sequence[bytes]) -> None:
        """Add all of ``records`` to a file, or nothing: behind half a record none is found."""
        text = b"".join(_FRAME.pack(len(each), crc32c(each)) + each for each in records)
        try:
            with path.open("ab", buffering=0) as file:
                before = file.tell()
                try:
                    if (done := file.write(text)) < len(text):
                        file.write(text[done:])  # says why
                except OSError:
                    file.truncate(before)
                    raise
        except OSError as error:
            raise CapacityError(
                f"log {self.name!r}: cannot keep {len(text):,} bytes in {self.path.parent}: "
                f"{error.strerror}; make room in shared memory"
            ) from error


def load_log(path: Path) -> RecordLog | None:
    """Read a log file up to its last whole record; None when not even the head is."""
    data, records, at = path.read_bytes(), [], 0
    while at + _FRAME.size <= len(data):
        nbytes, crc = _FRAME.unpack_from(data, at)
        record = data[at + _FRAME.size : at + _FRAME.size + nbytes]
        if len(record) != nbytes or crc32c(record) != crc:
            break
        records.append(record)
        at += _FRAME.size + nbytes
    try:
        head = msgspec.json.decode(records[0], type=_Head)
    except (IndexError, msgspec.DecodeError):
        return None
    log = RecordLog(name=head.name, node=head.node, path=path, base=head.base)
    log.records, log.nbytes = records[1:], sum(map(len, records[1:]))
    return log


class Logs:
    """This node's logs and the copies it keeps for others."""

    def __init__(self, core: Core, exchange: Exchange) -> None:
        self._core, self._exchange = core, exchange
        self._table: dict[tuple[str, str], RecordLog] = {}
        for path in core.arena.directory.glob(f"*{_SUFFIX}"):
            if (log := load_log(path)) is None:
                path.unlink()
            else:
                log.rewrite()
                self._table[log.node, log.name] = log
        core.on.adopt.append(self._adopt)

    def ops(self) -> dict[str, Op]:
        """Return what this part answers."""
        return {
            "log_open": (LogName, self._open),
            "log_append": (LogName, self._append),
            "log_read": (LogName, self._read),
            "log_read_here": (LogName, self._read_here),
            "log_truncate": (LogTruncate, self._truncate),
            "log_copy": (LogCopy, self._copy),
        }

    def nbytes(self) -> int:
        """Return the bytes of all records, copies included."""
        return sum(log.nbytes for log in self._table.values())

    def status(self) -> dict[str, Json]:
        """Return how many records of each log the next node does not have yet."""
        me = self._core.node
        return {
            "log_lag": {
                log.name: (log.end - max(log.copied, log.base)) if self._next() else 0
                for log in self._table.values()
                if log.node == me
            }
        }

    def _get(self, node: str, name: str) -> RecordLog:
        """Return a log, made where it is not there."""
        if (log := self._table.get((node, name))) is None:
            digest = hashlib.blake2b(f"{node}\0{name}".encode(), digest_size=12).hexdigest()
            path = self._core.arena.directory / f"{digest}{_SUFFIX}"
            log = RecordLog(name=name, node=node, path=path)
            log.rewrite()
            self._table[node, name] = log
        return log

    # -- writer ----------------------------------------------------------------------------------

    def _open(self, request: Request, body: LogName) -> None:
        request.reply(self._get(self._core.node, body.name).end)

    def _append(self, request: Request, body: LogName) -> None:
        log = self._get(self._core.node, body.name)
        log.append([bytes(frame) for frame in request.frames])
        request.reply(log.end)
        self._replicate(log)

    def _truncate(self, request: Request, body: LogTruncate) -> None:
        log = self._get(self._core.node, body.name)
        log.truncate(body.keep_from)
        request.reply()
        self._replicate(log)

    # -- copies ----------------------------------------------------------------------------------

    def _next(self) -> SidecarPeer | None:
        """Return the node behind this one in the group's order."""
        world = self._core.book.world
        if world is None or len(world.peers) < 2:
            return None
        names = [peer.node for peer in world.peers]
        if self._core.node not in names:
            return None
        return world.peers[(names.index(self._core.node) + 1) % len(names)]

    def _adopt(self, _world: SnapshotWorld) -> None:
        """The next node may be another one: send it all."""
        for log in self._table.values():
            if log.node == self._core.node:
                log.copied, log.sending = 0, False
                self._replicate(log)

    def _replicate(self, log: RecordLog) -> None:
        if (peer := self._next()) is None or log.sending:
            return
        log.sending = True
        generation = self._core.book.generation
        self._exchange.link(peer, purpose="logs").put(
            lambda client: self._send(log, client, generation)
        )

    def _send(self, log: RecordLog, client: Client, generation: int) -> None:
        """Send what is missing in parts until the next node has all; it says what it has.

        A refusal that does not pass by itself ends it; the next change of the log tries again.
        """
        while True:
            with self._core.lock:
                if self._core.book.generation != generation:
                    return
                at = max(log.copied, log.base)
                base, batch = log.base, _some(log.records[at - log.base :])
            body = LogCopy(node=log.node, name=log.name, base=base, at=at)
            try:
                answer, _ = client.call("log_copy", unparse(body), batch)
            except PeerError as error:
                with self._core.lock:
                    if self._core.book.generation == generation and not is_passing(error):
                        log.sending = False
                raise
            with self._core.lock:
                if self._core.book.generation != generation:
                    return
                log.copied = min(int(answer), log.end)
                if log.copied >= log.end and log.base == base:
                    log.sending = False
                    return

    def _copy(self, request: Request, body: LogCopy) -> None:
        if body.node == self._core.node:
            raise CkptError(f"log {body.name!r} is this node's own")
        log = self._get(body.node, body.name)
        log.truncate(body.base)
        known = log.end - body.at
        if known >= 0:
            log.append([bytes(frame) for frame in request.frames[known:]])
        request.reply(log.end)

    # -- reader ----------------------------------------------------------------------------------

    def _read_here(self, request: Request, body: LogName) -> None:
        node = body.node or self._core.node
        if (log := self._table.get((node, body.name))) is None:
            raise NotFoundError(f"node {self._core.node} has no log {body.name!r} of node {node}")
        _reply_log(request, log.base, log.records)

    def _read(self, request: Request, body: LogName) -> None:
        node = body.node or self._core.node
        if node == self._core.node:
            self._read_here(request, body)
            return
        peers = {peer.node: peer for peer in self._exchange.peers()}
        self._core.submit(request, lambda: self._find(request, body, node, peers), kind=Work.PEERS)

    def _find(
        self, request: Request, body: LogName, node: str, peers: dict[str, SidecarPeer]
    ) -> None:
        """Answer from the writer's node if it lives, else from the longest copy there is."""
        with ThreadPoolExecutor(max(1, len(peers))) as pool:
            answers = dict(
                zip(
                    peers, pool.map(lambda peer: self._ask(peer, body), peers.values()), strict=True
                )
            )
        if found := answers.pop(node, None):
            _reply_log(request, *found)
            return
        copies = list(answers.values())
        with self._core.lock:
            if log := self._table.get((node, body.name)):
                copies.append((log.base, list(log.records)))
        best = max((each for each in copies if each), key=_end, default=None)
        if best is None:
            asked = sorted({self._core.node, *peers})
            raise NotFoundError(f"none of the nodes {asked} has log {body.name!r} of node {node}")
        _reply_log(request, *best)

    def _ask(self, peer: SidecarPeer, body: LogName) -> tuple[int, list[bytes]] | None:
        client = Client(peer.address, self._core.key, timeout_s=ASK_TIMEOUT_S, watch=True)
        try:
            answer, frames = client.call("log_read_here", unparse(body))
            contents = msgspec.convert(answer, LogContents)
        except (PeerError, msgspec.ValidationError):
            return None
        finally:
            client.close()
        records, at = [], 0
        for nbytes in contents.lengths:
            records.append(bytes(frames[0][at : at + nbytes]))
            at += nbytes
        return contents.base, records


def _end(contents: tuple[int, list[bytes]]) -> int:
    return contents[0] + len(contents[1])


def _some(records: Sequence[bytes]) -> list[bytes]:
    """Return as many of the first records as make one part, at least one."""
    some: list[bytes] = []
    size = 0
    for record in records:
        size += len(record)
        if some and size > PART_BYTES:
            break
        some.append(record)
    return some


def _reply_log(request: Request, base: int, records: Sequence[bytes]) -> None:
    contents = LogContents(base=base, lengths=tuple(map(len, records)))
    request.reply(unparse(contents), [b"".join(records)])


learn(globals())
