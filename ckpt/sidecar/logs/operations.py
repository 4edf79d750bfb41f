"""Record logs: appended to by one worker, copied to other nodes, read after its death.

A log lies in segment files of the arena directory, so it survives its worker and a crash of this
sidecar. As many other nodes of the parity group as the world has parity hold whole copies of it, a
bounded delay behind (see `log_copies`). After a change of the group, copies are made again. The
nodes that have copies of logs whose writers are gone keep them (see `log_keeping`), until the
content was taken over and the log is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from time import monotonic
from typing import Any

from holdfast.ckpt.errors import CapacityError, CkptError, CorruptError, FencedError, NotFoundError
from holdfast.ckpt.memory.records import SnapshotWorld
from holdfast.ckpt.sidecar.core.core import Core, Op, Waiter, WaitingWork
from holdfast.ckpt.sidecar.core.messages import (
    LogAppend,
    LogAwait,
    LogCopy,
    LogForget,
    LogName,
    LogRead,
    LogState,
    LogTruncate,
    unparse,
)
from holdfast.ckpt.sidecar.logs.copies import MAX_COPY_BYTES, CopyTiming, LogProtection
from holdfast.ckpt.sidecar.logs.frames import Frames, parse
from holdfast.ckpt.sidecar.logs.keeping import LogKeeping
from holdfast.ckpt.sidecar.logs.reading import LogFinder, Page, read_here
from holdfast.ckpt.sidecar.logs.record_log import RecordLog, load_logs
from holdfast.ckpt.sidecar.parity.exchange import ParityExchange
from holdfast.ckpt.transport import Request
from holdfast.ckpt.types import Json

MAX_INDEX = 1 << 62
_AT_ONCE_BYTES = 64 << 10
_TOMBSTONES = 4096


class RecordLogs:
    """This node's logs and the copies it keeps for others.

    ``admit(nbytes)`` is called before a file is made; it raises ``CapacityError``.
    """

    def __init__(
        self,
        core: Core,
        exchange: ParityExchange,
        *,
        admit: Callable[[int], None],
        timing: CopyTiming | None = None,
    ) -> None:
        self._core, self._exchange, self._admit = core, exchange, admit
        self._protection = LogProtection(core, timing or CopyTiming())
        self._keeping = LogKeeping(core, self._remove)
        self._dropped: dict[tuple[str, str], int] = {}
        self._table = {
            (log.node, log.name): log for log in load_logs(core.arena.directory, reserve=admit)
        }
        for log in self._table.values():
            if log.node == core.node:
                self._protection.add(log)

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {
            "log_open": (LogName, self._open),
            "log_append": (LogAppend, self._append),
            "log_truncate": (LogTruncate, self._truncate),
            "log_protected": (LogAwait, self._protected),
            "log_read": (LogRead, self._read),
            "log_drop": (LogName, self._drop),
            "log_read_here": (LogRead, self._read_here),
            "log_state": (LogName, self._state),
            "log_copy": (LogCopy, self._copy),
            "log_forget": (LogForget, self._forget),
        }

    def nbytes(self) -> int:
        """Return the bytes of all log files, copies included."""
        return sum(log.nbytes for log in self._table.values())

    def status(self) -> dict[str, Json]:
        """Return the unprotected records of each log, and the number of unsettled copies."""
        return {
            **self._protection.status(),
            "log_copies": sum(log.node != self._core.node for log in self._table.values()),
            "log_copies_unsettled": self._keeping.unsettled(),
        }

    def adopted(self, world: SnapshotWorld) -> None:
        """Have the copies of all logs made where the new group wants them."""
        self._protection.adopt(world)
        self._keeping.adopt({log for log in self._table.values() if log.node != self._core.node})

    def close(self) -> None:
        """End all threads and unmap."""
        with self._core.lock:
            self._protection.close()
            self._keeping.close()
            for log in self._table.values():
                log.close()

    # -- writer ----------------------------------------------------------------------------------

    def _own(self, name: str) -> RecordLog:
        if (log := self._table.get((self._core.node, name))) is None:
            raise NotFoundError(f"node {self._core.node} has no log {name!r}; open it first")
        return log

    def _open(self, request: Request, body: LogName) -> None:
        core = self._core
        if (log := self._table.get((core.node, body.name))) is None:
            log = RecordLog.create(
                core.arena.directory, body.name, node=core.node, reserve=self._admit
            )
            self._table[core.node, body.name] = log
            self._protection.add(log)
        request.reply(log.end)

    def _append(self, request: Request, body: LogAppend) -> None:
        log = self._own(body.name)
        records = _cut(request.frames, body.lengths)
        try:
            log.append(records)
        except CapacityError:
            self._core.counters["log_full"] += 1
            raise
        request.reply(log.end)
        self._protection.changed(log)

    def _truncate(self, request: Request, body: LogTruncate) -> None:
        log = self._own(body.name)
        if body.keep_from > MAX_INDEX:
            raise CkptError(f"log_truncate: {body.keep_from} is beyond any index; give a smaller")
        log.truncate(body.keep_from)
        request.reply()
        self._protection.changed(log)

    def _protected(self, request: Request, body: LogAwait) -> None:
        log, wanted = self._own(body.name), body.at_least

        def answer() -> bool:
            reached = log.base if log.closed else self._protection.protected(log)
            if wanted is not None and reached < wanted and not log.closed:
                return False
            request.reply(reached)
            self._protection.waiting(-1)
            return True

        def expire() -> None:
            self._protection.waiting(-1)
            request.reply(log.base if log.closed else self._protection.protected(log))

        self._protection.waiting(+1)
        deadline_s = monotonic() + body.timeout_s
        self._core.wait(
            Waiter(request=request, deadline_s=deadline_s, attempt=answer, expire=expire)
        )

    # -- copies ----------------------------------------------------------------------------------

    def _copy(self, request: Request, body: LogCopy) -> None:
        self._check(request, body)
        if body.count == 0:
            request.reply(unparse(self._take(body, None)))
            return
        data = request.frames[0]

        def take() -> None:
            try:
                frames = parse(data, body.at, count=body.count, origin=f"log {body.name!r}")
            except CorruptError:
                self._core.counters["log_refused_damaged"] += 1
                raise
            with self._core.lock:
                self._core.book.require(body.generation)
                state = self._take(body, frames)
            request.reply(unparse(state))

        if data.nbytes <= _AT_ONCE_BYTES:
            take()
        else:
            self._core.submit(request, take, kind=WaitingWork.CPU)

    def _check(self, request: Request, body: LogCopy) -> None:
        """Refuse, and count, messages that no sidecar of this generation would send."""
        counters = self._core.counters
        try:
            self._core.book.require(body.generation)
        except FencedError:
            counters["log_refused_stale"] += 1
            raise
        if sum(frame.nbytes for frame in request.frames) > MAX_COPY_BYTES:
            counters["log_refused_oversized"] += 1
            raise CkptError(f"log_copy: more than {MAX_COPY_BYTES:,} bytes; send it in parts")
        wrong = body.node == self._core.node or len(request.frames) != (body.count > 0)
        wrong |= body.birth < 1 or body.count < 0
        if wrong or not 0 <= body.base <= body.at <= MAX_INDEX:
            counters["log_refused_malformed"] += 1
            raise CkptError(f"log_copy: {body} does not describe a copy of another node's records")

    def _take(self, body: LogCopy, frames: Frames | None) -> LogState:
        """Add missing records to a copy; the newer log of a name replaces the older."""
        key = (body.node, body.name)
        log = self._table.get(key)
        if body.birth <= self._dropped.get(key, 0):
            return self._describe(key)
        if log is None or log.birth != body.birth:
            newer_here = log is not None and log.birth > body.birth and not body.owner
            if frames is None or frames.first != body.base or newer_here:
                return self._describe(key)
            fresh = RecordLog.create(
                self._core.arena.directory,
                body.name,
                node=body.node,
                first=body.base,
                birth=body.birth,
                reserve=self._admit,
            )
            if log is not None:
                self._remove(log)
            self._table[key] = log = fresh
        log.truncate(body.base)
        if frames is not None:
            self._extend(log, frames)
        return self._describe(key)

    @staticmethod
    def _extend(log: RecordLog, frames: Frames) -> None:
        """Add the frames behind a copy's end; where both differ, the source is right."""
        for index in range(max(frames.first, log.base), min(frames.end, log.end)):
            if not frames.is_hole(index) and frames.crc(index) != log.crc(index):
                log.cut(index)
                break
        if frames.first <= log.end < frames.end:
            log.append_frames(frames.since(log.end))

    def _describe(self, key: tuple[str, str]) -> LogState:
        dropped = self._dropped.get(key, 0)
        if (log := self._table.get(key)) is None:
            return LogState(dropped=dropped)
        return LogState(
            birth=log.birth,
            base=log.base,
            end=log.end,
            last_crc=log.crc(log.end - 1),
            dropped=dropped,
            settled=self._protection.is_settled(log.name) and log.node == self._core.node,
        )

    def _state(self, request: Request, body: LogName) -> None:
        request.reply(unparse(self._describe((body.node or self._core.node, body.name))))

    # -- the end of a log ------------------------------------------------------------------------

    def _drop(self, request: Request, body: LogName) -> None:
        """Drop a log on all nodes: its worker is gone, its content was taken over."""
        core = self._core
        key = (body.node or core.node, body.name)
        peers = {peer.node: peer for peer in self._exchange.peers()}
        finder = LogFinder(core, LogRead(name=body.name, node=key[0]), here=self._table.get(key))

        def drop() -> None:
            birth = finder.newest_birth(peers)
            with core.lock:
                self._bury(key, birth)
                if birth:
                    forget = LogForget(node=key[0], name=key[1], birth=birth)
                    self._exchange.tell_all("log_forget", forget)
            request.reply()

        core.submit(request, drop, kind=WaitingWork.PEERS)

    def _forget(self, request: Request, body: LogForget) -> None:
        self._bury((body.node, body.name), body.birth)
        request.reply()

    def _bury(self, key: tuple[str, str], birth: int) -> None:
        """Drop a log born no later than ``birth``, and remember that it must not come back."""
        log = self._table.get(key)
        if log is not None and log.birth <= birth:
            self._remove(log)
            self._core.counters["log_dropped"] += 1
        if birth > self._dropped.get(key, 0):
            self._dropped.pop(key, None)
            self._dropped[key] = birth
        while len(self._dropped) > _TOMBSTONES:
            del self._dropped[next(iter(self._dropped))]

    def _remove(self, log: RecordLog) -> None:
        if self._table.get((log.node, log.name)) is log:
            del self._table[log.node, log.name]
        if log.node == self._core.node:
            self._protection.remove(log.name)
        log.remove()

    # -- reader ----------------------------------------------------------------------------------

    def _read_here(self, request: Request, body: LogRead) -> None:
        core, node = self._core, body.node or self._core.node
        if (log := self._table.get((node, body.name))) is None:
            raise NotFoundError(f"node {core.node} has no log {body.name!r} of node {node}")
        core.submit(
            request, lambda: _reply(request, read_here(core, log, body)), kind=WaitingWork.CPU
        )

    def _read(self, request: Request, body: LogRead) -> None:
        key = (body.node or self._core.node, body.name)
        peers = {peer.node: peer for peer in self._exchange.peers()}
        finder = LogFinder(self._core, body, here=self._table.get(key))
        self._core.submit(
            request, lambda: _reply(request, finder.find(peers)), kind=WaitingWork.PEERS
        )


def _cut(frames: Sequence[memoryview], lengths: Sequence[int]) -> list[memoryview]:
    if len(frames) != 1 or min(lengths, default=0) < 0 or frames[0].nbytes != sum(lengths):
        raise CkptError("log_append: the bytes are not those of the records; send them again")
    ends = accumulate(lengths)
    return [frames[0][end - nbytes : end] for end, nbytes in zip(ends, lengths, strict=True)]


def _reply(request: Request, page: Page) -> None:
    frames: Sequence[Any] = [page.frames.data]
    request.reply(unparse(page.message()), frames)
