"""The sources of a rebuild's fragments: this node, memory of others on this host, the network."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
from typing_extensions import Buffer

from holdfast.ckpt.errors import CkptError, CorruptError, NotFoundError, PeerError
from holdfast.ckpt.memory.arena import SlotFile, run_digest
from holdfast.ckpt.memory.block import SlotState, block_bytes
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.memory.records import BlockEntry, ParityEntry, SidecarPeer
from holdfast.ckpt.parity.row_file import RowFile
from holdfast.ckpt.parity.stripes import BlockRecovery, ColumnRead, Span
from holdfast.ckpt.sidecar.core.core import THREADS, Core
from holdfast.ckpt.sidecar.core.messages import Key, Read, ReadRow, SnapshotHoldings, unparse
from holdfast.ckpt.sidecar.core.wire import PART_BYTES, split_checked
from holdfast.ckpt.sidecar.parity.rows import Parities
from holdfast.ckpt.sidecar.reading.holdings import holdings_of
from holdfast.ckpt.transport import Client

ASK_TIMEOUT_S = 3.0
FETCH_TIMEOUT_S = 15.0
FETCH_THREADS = 8
LOCAL_BYTES = 4 << 20
LANES = 2
"""The connections to a node, so that one part travels while another is decoded."""

_HELD = (SlotState.SEALED, SlotState.COMMITTED)
_BlockAt: TypeAlias = tuple[str, int]
_RowAt: TypeAlias = tuple[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """Memory of this host, readable while its header names the wanted contents."""

    view: memoryview
    is_current: Callable[[], bool]
    close: Callable[[], None]


class _FragmentScratch(threading.local):
    """A thread's buffers for a part of each fragment."""

    def __init__(self) -> None:
        self.rooms: dict[int, bytearray] = {}


class Sources:
    """The sources from which a rebuild reads. Fragments on this host are read by mapping.

    ``run`` is the run that sealed them: an earlier one, where they are on disks.
    """

    def __init__(
        self,
        core: Core,
        parities: Parities,
        *,
        peers: Sequence[SidecarPeer],
        maps: SlotMaps,
        run: str,
    ) -> None:
        self._core, self._parities, self._maps = core, parities, maps
        self._run = run_digest(run)
        self._peers = {peer.node: peer for peer in peers}
        self._clients: dict[str, queue.SimpleQueue[Client]] = {}
        self._opened: list[Client] = []
        self._lock = threading.Lock()
        self._blocks: dict[_BlockAt, _Local] = {}
        self._rows: dict[_RowAt, _Local] = {}
        self._scratch = _FragmentScratch()
        self.pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch")

    def close(self) -> None:
        """Close connections and files without waiting for open answers."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for client in self._opened:
            client.close()
        for local in (*self._blocks.values(), *self._rows.values()):
            local.close()

    def holdings(self, key: Key) -> Iterator[dict[str, SnapshotHoldings]]:
        """Yield the known holdings of a snapshot, again after each peer's answer."""
        with self._core.lock:
            found = {self._core.node: holdings_of(self._core, self._parities, key)}
        yield found
        requests = {
            self.pool.submit(self._ask, peer, key): peer.node for peer in self._peers.values()
        }
        for future in as_completed(requests):
            if (answer := future.result()) is not None:
                found[requests[future]] = answer
                yield found

    def _ask(self, peer: SidecarPeer, key: Key) -> SnapshotHoldings | None:
        client = Client(peer.address, self._core.key, timeout_s=ASK_TIMEOUT_S, watch=True)
        try:
            answer, _ = client.call("holdings", unparse(key))
            return msgspec.convert(answer, SnapshotHoldings)
        except (PeerError, msgspec.ValidationError):
            return None
        finally:
            client.close()

    # -- connecting ------------------------------------------------------------------------------

    def connect(self, nodes: Iterable[str], found: Mapping[str, SnapshotHoldings]) -> None:
        """Map the nodes' files where they are on this host."""
        for node in set(nodes):
            holdings = found[node]
            if node == self._core.node:
                self._find_own(holdings)
            elif holdings.host and holdings.host == self._core.host:
                self._open_files(node, holdings)

    def _find_own(self, holdings: SnapshotHoldings) -> None:
        core, run = self._core, self._run
        for entry in holdings.blocks:
            with core.lock:
                slot = core.slots.holding((entry.generation, entry.step, entry.rank))
            if slot is not None and (local := _local_block(slot.file, entry, run)):
                self._blocks[core.node, entry.rank] = local
        for parity in holdings.parities:
            place = (parity.stripe, parity.row)
            row = self._parities.get((parity.generation, parity.step), place)
            file = row.file if row is not None else None
            if file is not None and (local := _local_row(file, parity, run, _nothing)):
                self._rows[core.node, place] = local

    def _open_files(self, node: str, holdings: SnapshotHoldings) -> None:
        run = self._run
        for entry, ref in zip(holdings.blocks, holdings.block_files, strict=False):
            if (node, entry.rank) in self._blocks or ref is None or not ref.is_here():
                continue
            with contextlib.suppress(OSError, CkptError):
                if local := _local_block(self._maps.open(ref.path, warm=False), entry, run):
                    self._blocks[node, entry.rank] = local
        for parity, ref in zip(holdings.parities, holdings.row_files, strict=False):
            at = (node, (parity.stripe, parity.row))
            if at in self._rows or ref is None or not ref.is_here():
                continue
            with contextlib.suppress(OSError, CkptError):
                file = RowFile.open(ref.path)
                if local := _local_row(file, parity, run, file.close):
                    self._rows[at] = local

    def size(self, plan: Iterable[BlockRecovery]) -> int:
        """Return the number of bytes to decode at a time."""
        return LOCAL_BYTES if self._is_here(plan) else PART_BYTES

    def lanes(self, plan: Iterable[BlockRecovery]) -> int:
        """Return the number of parts to decode in parallel.

        The processors limit fragments on this host, the network limits the others.
        """
        return THREADS if self._is_here(plan) else FETCH_THREADS

    def _is_here(self, plan: Iterable[BlockRecovery]) -> bool:
        for each in plan:
            blocks = {(node, span.rank) for read in each.columns for span, node in read.spans}
            rows = {(row.node, (each.stripe, row.row)) for row in each.rows}
            if not (blocks <= self._blocks.keys() and rows <= self._rows.keys()):
                return False
        return True

    def check_current(self) -> None:
        """Raise ``NotFoundError`` if a file that was read has been reused meanwhile."""
        for (node, rank), block in self._blocks.items():
            if not block.is_current():
                raise NotFoundError(f"the block of rank {rank} on node {node} was released")
        for (node, place), row in self._rows.items():
            if not row.is_current():
                raise NotFoundError(f"parity row {place} on node {node} was released")

    def _room(self, number: int, nbytes: int) -> memoryview:
        """Return this thread's buffer for a part of fragment ``number``; each part reuses it."""
        rooms = self._scratch.rooms
        if len(rooms.get(number, b"")) < nbytes:
            rooms[number] = bytearray(nbytes)
        return memoryview(rooms[number])[:nbytes]

    # -- fragments -------------------------------------------------------------------------------

    def column(self, read: ColumnRead, window: tuple[int, int], key: Key) -> Buffer:
        """Return bytes ``window`` of a column, counted from the start of its spans.

        Zeros at the end may be left out. The bytes are valid until the same thread asks for the
        same column again.
        """
        lo, hi = window
        parts = [
            (Span(rank=span.rank, at=span.at + a - span.into, nbytes=b - a, into=a - lo), node)
            for span, node in read.spans
            if (a := max(span.into, lo)) < (b := min(span.into + span.nbytes, hi))
        ]
        if not parts:
            return b""
        if len(parts) == 1 and parts[0][0].into == 0:
            return self._block(*parts[0], key)
        into, covered = self._room(read.column, hi - lo), 0
        for span, node in parts:
            np.frombuffer(into, dtype=np.uint8)[covered : span.into] = 0
            covered = span.into + span.nbytes
            into[span.into : covered] = memoryview(self._block(span, node, key)).cast("B")
        return into[:covered]

    def _block(self, span: Span, node: str, key: Key) -> Buffer:
        if (local := self._blocks.get((node, span.rank))) is not None:
            return local.view[span.at : span.at + span.nbytes]
        if node == self._core.node:
            raise NotFoundError(f"the block of rank {span.rank} was released meanwhile")
        ranges = ((span.at, span.nbytes),)
        body = Read(generation=key.generation, step=key.step, rank=span.rank, ranges=ranges)
        return self._call(node, "read", body, span.nbytes)

    def row(self, node: str, body: ReadRow) -> Buffer:
        """Return a part of a parity row held by ``node``."""
        place = (body.stripe, body.row)
        if (local := self._rows.get((node, place))) is not None:
            return local.view[body.at : body.at + body.nbytes]
        if node == self._core.node:
            raise NotFoundError(f"parity row {body.row} was released meanwhile")
        return self._call(node, "row", body, body.nbytes)

    def _call(self, node: str, op: str, body: Read | ReadRow, nbytes: int) -> memoryview:
        clients = self._connections(node)
        client = clients.get()
        try:
            answer, frames = client.call(op, unparse(body), bulk=True)
        finally:
            clients.put(client)
        try:
            return split_checked(answer, frames, [nbytes], origin=f"{node}: {op}")[0]
        except CorruptError as error:  # damaged in transfer, not at its source
            raise PeerError(str(error), peer_code=CorruptError.code) from error

    def _connections(self, node: str) -> queue.SimpleQueue[Client]:
        """Return the idle connections to a node, made at the first need."""
        with self._lock:
            if node not in self._clients:
                self._clients[node] = queue.SimpleQueue()
                for _ in range(LANES):
                    peer, key = self._peers[node], self._core.key
                    client = Client(peer.address, key, timeout_s=FETCH_TIMEOUT_S, watch=True)
                    self._opened.append(client)
                    self._clients[node].put(client)
            return self._clients[node]


def _nothing() -> None:
    pass


def _local_block(slot: SlotFile, entry: BlockEntry, run: bytes) -> _Local | None:
    def is_current() -> bool:
        try:
            header = slot.read_header(run=run)
        except ValueError:  # unmapped meanwhile: its file was removed
            return False
        return header is not None and header.state in _HELD and header.entry() == entry

    if not is_current() or slot.capacity < (nbytes := block_bytes(entry)):
        return None
    return _Local(view=slot.block(nbytes), is_current=is_current, close=_nothing)


def _local_row(
    row: RowFile, entry: ParityEntry, run: bytes, close: Callable[[], None]
) -> _Local | None:
    def is_current() -> bool:
        try:
            label = row.read_label(run=run)
        except ValueError:
            return False
        return label is not None and label.entry == entry

    if is_current():
        return _Local(view=row.row(entry.nbytes), is_current=is_current, close=close)
    close()
    return None
