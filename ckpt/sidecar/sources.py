"""Where a rebuild gets its fragments: this node, files of other nodes on this host, the wire."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeAlias

import msgspec
import numpy as np
from typing_extensions import Buffer

from ckpt.arena import HEADER_BYTES, SlotFile
from ckpt.block import SlotState
from ckpt.errors import CkptError, CorruptError, NotFoundError, PeerError
from ckpt.sidecar.core import THREADS, Core
from ckpt.sidecar.holdings import holdings_of
from ckpt.sidecar.hosts import FileRef, host_id
from ckpt.sidecar.messages import Holdings, Key, Read, ReadRow, unparse
from ckpt.sidecar.parity import Parities
from ckpt.sidecar.row_file import RowFile
from ckpt.sidecar.wire import PART_BYTES, split_checked
from ckpt.stripes import ColumnRead, Span
from ckpt.transport import Client
from ckpt.world import BlockEntry, ParityEntry, SidecarPeer

ASK_TIMEOUT_S = 3.0
FETCH_TIMEOUT_S = 15.0
FETCH_THREADS = 8
LOCAL_BYTES = 512 << 10
LANES = 2
"""Connections to a node, so that one part travels while another is decoded."""

_HELD = (SlotState.SEALED, SlotState.COMMITTED)
_BlockAt: TypeAlias = tuple[str, int]
_RowAt: TypeAlias = tuple[str, tuple[int, int]]


class _Local:
    """A file of this host that is read while its header says that it holds what was meant.

    It is read rather than mapped: filling a page table for one pass costs more than the copy.
    """

    def __init__(
        self, path: str, is_current: Callable[[], bool], close: Callable[[], None]
    ) -> None:
        self.is_current, self._close = is_current, close
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, at: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``at`` behind the header."""
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], HEADER_BYTES + at + done)
            if not count:
                raise NotFoundError(f"a file of this host ends before byte {at + done}")
            done += count

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)
        self._close()


class _Scratch(threading.local):
    """Room of a thread for a part of each fragment."""

    def __init__(self) -> None:
        self.rooms: dict[int, bytearray] = {}


class Sources:
    """What a rebuild reads from. Fragments of this host are read from their files."""

    def __init__(self, core: Core, parities: Parities, peers: Sequence[SidecarPeer]) -> None:
        self._core, self._parities = core, parities
        self._peers = {peer.node: peer for peer in peers}
        self._clients: dict[str, queue.SimpleQueue[Client]] = {}
        self._opened: list[Client] = []
        self._blocks: dict[_BlockAt, _Local] = {}
        self._rows: dict[_RowAt, _Local] = {}
        self._scratch = _Scratch()
        self.pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch")

    def close(self) -> None:
        """Close connections and files; who has not answered yet is not waited for."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for client in self._opened:
            client.close()
        for local in (*self._blocks.values(), *self._rows.values()):
            local.close()

    def holdings(self, key: Key) -> Iterator[dict[str, Holdings]]:
        """Yield what is known to be held of a snapshot, again after each peer's answer."""
        with self._core.lock:
            found = {self._core.node: holdings_of(self._core, self._parities, key)}
        yield found
        asked = {self.pool.submit(self._ask, peer, key): peer.node for peer in self._peers.values()}
        for future in as_completed(asked):
            if (answer := future.result()) is not None:
                found[asked[future]] = answer
                yield found

    def _ask(self, peer: SidecarPeer, key: Key) -> Holdings | None:
        client = Client(peer.address, self._core.key, timeout_s=ASK_TIMEOUT_S, watch=True)
        try:
            answer, _ = client.call("holdings", unparse(key))
            return msgspec.convert(answer, Holdings)
        except (PeerError, msgspec.ValidationError):
            return None
        finally:
            client.close()

    # -- connecting ------------------------------------------------------------------------------

    def connect(self, nodes: Iterable[str], found: Mapping[str, Holdings]) -> None:
        """Open the nodes' files where they are on this host, and connections to the others."""
        for node in set(nodes):
            holdings = found[node]
            if holdings.host and holdings.host == host_id():
                self._open_files(node, holdings)
            if node != self._core.node and node not in self._clients:
                self._clients[node] = queue.SimpleQueue()
                for _ in range(LANES):
                    client = self._connect(self._peers[node])
                    self._opened.append(client)
                    self._clients[node].put(client)

    def _connect(self, peer: SidecarPeer) -> Client:
        return Client(peer.address, self._core.key, timeout_s=FETCH_TIMEOUT_S, watch=True)

    def _open_files(self, node: str, holdings: Holdings) -> None:
        run = self._core.arena.run
        for entry, file in zip(holdings.blocks, holdings.block_files, strict=False):
            if (node, entry.rank) not in self._blocks and (local := _local_block(file, entry, run)):
                self._blocks[node, entry.rank] = local
        for parity, file in zip(holdings.parities, holdings.row_files, strict=False):
            at = (node, (parity.stripe, parity.row))
            if at not in self._rows and (local := _local_row(file, parity, run)):
                self._rows[at] = local

    def pace(self, nodes: Iterable[str]) -> tuple[int, int]:
        """Return how many bytes to decode at a time, and how many times side by side.

        What lies on this host is limited by the processors and should stay in their caches; what
        travels is limited by the way.
        """
        own = {node for node, _ in self._blocks} | {node for node, _ in self._rows}
        return (LOCAL_BYTES, THREADS) if set(nodes) <= own else (PART_BYTES, FETCH_THREADS)

    def check_current(self) -> None:
        """Raise ``NotFoundError`` if a file that was read is used for something else by now."""
        for (node, rank), block in self._blocks.items():
            if not block.is_current():
                raise NotFoundError(f"the block of rank {rank} on node {node} was released")
        for (node, place), row in self._rows.items():
            if not row.is_current():
                raise NotFoundError(f"parity row {place} on node {node} was released")

    def _room(self, number: int, nbytes: int) -> memoryview:
        """Return room of this thread for a part of fragment ``number``; used again for the next."""
        rooms = self._scratch.rooms
        if len(rooms.get(number, b"")) < nbytes:
            rooms[number] = bytearray(nbytes)
        return memoryview(rooms[number])[:nbytes]

    # -- fragments -------------------------------------------------------------------------------

    def column(self, read: ColumnRead, window: tuple[int, int], key: Key) -> Buffer:
        """Return bytes ``window`` of a column, counted from where its spans begin to count.

        They are good until the same thread asks for the same column again.
        """
        lo, hi = window
        into = self._room(read.column, hi - lo)
        covered = 0
        for span, node in read.spans:
            a, b = max(span.into, lo), min(span.into + span.nbytes, hi)
            if a < b:
                np.frombuffer(into, dtype=np.uint8)[covered : a - lo] = 0
                part = Span(rank=span.rank, at=span.at + a - span.into, nbytes=b - a, into=0)
                self._block(node, part, into[a - lo : b - lo], key)
                covered = b - lo
        np.frombuffer(into, dtype=np.uint8)[covered:] = 0
        return into

    def _block(self, node: str, span: Span, into: memoryview, key: Key) -> None:
        if (local := self._blocks.get((node, span.rank))) is not None:
            local.read(span.at, into)
        elif node == self._core.node:
            self._own_block(key, span, into)
        else:
            ranges = ((span.at, span.nbytes),)
            body = Read(generation=key.generation, step=key.step, rank=span.rank, ranges=ranges)
            into[:] = self._call(node, "read", body, span.nbytes)

    def _own_block(self, key: Key, span: Span, into: memoryview) -> None:
        core = self._core
        with core.lock:
            slot = core.slots.holding((key.generation, key.step, span.rank))
            if slot is None:
                raise NotFoundError(f"the block of rank {span.rank} was released meanwhile")
            core.slots.pin(slot)
        try:
            into[:] = slot.view()[span.at : span.at + span.nbytes]
        finally:
            core.unpin(slot)

    def row(self, node: str, body: ReadRow, *, number: int) -> Buffer:
        """Return a part of a parity row held by ``node``, which is fragment ``number``.

        It is good until the same thread asks for the same fragment again.
        """
        place = (body.stripe, body.row)
        if (local := self._rows.get((node, place))) is not None:
            into = self._room(number, body.nbytes)
            local.read(body.at, into)
            return into
        if node == self._core.node:
            row = self._parities.get((body.generation, body.step), place)
            if row is None:
                raise NotFoundError(f"parity row {body.row} was released meanwhile")
            with row.lock:
                return row.part(body.at, body.nbytes)
        return self._call(node, "row", body, body.nbytes)

    def _call(self, node: str, op: str, body: Read | ReadRow, nbytes: int) -> memoryview:
        client = self._clients[node].get()
        try:
            answer, frames = client.call(op, unparse(body), bulk=True)
        finally:
            self._clients[node].put(client)
        try:
            return split_checked(answer, frames, [nbytes], origin=f"{node}: {op}")[0]
        except CorruptError as error:  # on the way: not a fragment that is wrong where it lies
            raise PeerError(str(error), kind="CorruptError") from error


def _local_block(file: FileRef | None, entry: BlockEntry, run: bytes) -> _Local | None:
    if file is None or not file.is_here():
        return None
    try:
        slot = SlotFile.open(file.path)
    except (OSError, CkptError):
        return None

    def is_current() -> bool:
        header = slot.read_header(run=run)
        return header is not None and header.state in _HELD and header.entry() == entry

    return _opened(file, is_current, slot.close)


def _local_row(file: FileRef | None, entry: ParityEntry, run: bytes) -> _Local | None:
    if file is None or not file.is_here():
        return None
    try:
        row = RowFile.open(file.path)
    except (OSError, CkptError):
        return None

    def is_current() -> bool:
        label = row.read_label(run=run)
        return label is not None and label.entry == entry

    return _opened(file, is_current, row.close)


def _opened(
    file: FileRef, is_current: Callable[[], bool], close: Callable[[], None]
) -> _Local | None:
    if is_current():
        try:
            return _Local(file.path, is_current, close)
        except OSError:  # removed meanwhile
            return None
    close()
    return None


@contextmanager
def sources_of(core: Core, parities: Parities, peers: Sequence[SidecarPeer]) -> Iterator[Sources]:
    """Return the sources of one rebuild, closed at the end."""
    sources = Sources(core, parities, peers)
    try:
        yield sources
    finally:
        sources.close()
