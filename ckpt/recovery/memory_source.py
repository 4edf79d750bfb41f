"""Reading of a snapshot from the sidecars' memory: mapped on this host, else over the network.

Bytes are copied directly from their source to their destination and checked in the copy. A few
threads do this at once, and bytes from the network are copied while more are in transfer. Faults
are recorded (`MemorySource.faults`), so that another restore point can be chosen.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeAlias

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import CapacityError, CkptError, CorruptError, NotFoundError, PeerError
from holdfast.ckpt.format.checked_copy import copy_chunks
from holdfast.ckpt.geometry.scatter import ByChunk, Delivery, cut
from holdfast.ckpt.geometry.shard_index import ChunkRef, ShardIndex, decode_index
from holdfast.ckpt.memory.arena import SlotFile, SlotHeader, run_digest
from holdfast.ckpt.memory.block import SlotState, offered_under
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.memory.records import BlockSource, RestorePoint, SnapshotWorld
from holdfast.ckpt.meters import Meters
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.recovery.fallback import WHOLE_POINT, ReadFault, ReadFaultKind
from holdfast.ckpt.recovery.prefetched import Ahead, compare
from holdfast.ckpt.sidecar.client import BlockHandle, SidecarClient
from holdfast.ckpt.transport import RunKey

BATCH_BYTES: Final = 16 << 20
TIERS: Final = ("arena", "prefetched", "peer", "parity", "disk")
"""The sources of bytes, as counted by `MemorySource.tiers`.

They are this node's memory, bytes fetched before the restore, another node's memory, ``k``
fragments, and a disk.
"""

_RUN_BYTES: Final = 8 << 20
_INLINE_BYTES: Final = 1 << 20
_AHEAD: Final = 4
_LANDING_AHEAD: Final = 16
_APART: Final = 2
"""Chunks are adjacent if they lie in this many times as many bytes as they have."""

_THREADS: Final = 4
LAND_THREADS: Final = 3
_WHOLE_FROM: Final = 4
"""A lost block is rebuilt whole if more than 1 / ``_WHOLE_FROM`` of it is wanted.

A whole block is mapped, while parts of it travel through a socket.
"""

_POLL_S: Final = 0.005
_OTHERS_S: Final = 1.0
"""The time in which the other blocks may still be opened after one has failed."""


class BlockClient(Protocol):
    """The part of a ``SidecarClient`` that a MemorySource uses."""

    def open_block(
        self, world: SnapshotWorld, step: int, source: BlockSource, *, in_parts: bool = False
    ) -> BlockHandle: ...

    def read(
        self, world: SnapshotWorld, step: int, rank: int, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview]: ...

    def changed(
        self, world: SnapshotWorld, step: int, rank: int, *, base: tuple[int, int]
    ) -> tuple[tuple[int, int], ...] | None: ...

    def distrust(self, world: SnapshotWorld, step: int, rank: int) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """An opened block: mapped, with ``slot`` and its ``header``, or read through ``client``.

    A block that is read ``in_parts`` is lost, and its parts are not verified. A ``prefetched``
    block uses chunks that this process has already.
    """

    source: BlockSource
    index: ShardIndex
    client: BlockClient
    tier: str
    slot: SlotFile | None
    header: SlotHeader | None
    payload: memoryview | None
    in_parts: bool
    prefetched: bool = False

    def fill_pages(self, run: Sequence[Delivery]) -> None:
        """Fill the page table for adjacent chunks, on the thread that then copies them."""
        if self.payload is None or self.slot is None or self.slot.is_warm:
            return
        at, last = (chunk.at for chunk in (run[0][0].chunk, run[-1][0].chunk))
        nbytes = last + run[-1][0].chunk.nbytes - at
        if 0 < nbytes <= _APART * sum(ref.chunk.nbytes for ref, _ in run):
            self.slot.warm_part(at, nbytes)


_Task: TypeAlias = tuple[_Block, Sequence[Delivery]]
_Opening: TypeAlias = tuple[ThreadPoolExecutor, Sequence[Future[_Block]]]


class MemorySource(Closing):
    """A `ShardSource` over the blocks that a restore point names; ``with`` begins to open them.

    Lost blocks are rebuilt whole where much of them is wanted; else only the wanted part is
    decoded. ``local`` is the client of ``local_node``'s sidecar; ``addresses`` has the addresses of
    the other nodes. Blocks on the host of ``maps``, which may be shared to stay warm, are mapped
    through it. Chunks of this step in ``ahead`` are taken from there. ``poll`` is called every few
    milliseconds during every wait, and may raise to stop. Safe for one reader at a time. ``cores``
    is the number of cores for copies; with one, the caller's own thread copies mapped blocks.

    ``faults`` lists the blocks found damaged, missing or unreachable. ``touched`` says whether any
    target may have been written to. ``sent_bytes`` counts the bytes that other processes sent.
    """

    def __init__(  # noqa: PLR0913 - all but one by keyword
        self,
        point: RestorePoint,
        *,
        local: BlockClient,
        local_node: str,
        addresses: Mapping[str, str],
        key: RunKey,
        maps: SlotMaps | None = None,
        ahead: Ahead | None = None,
        poll: Callable[[], None] | None = None,
        cores: int = LAND_THREADS,
    ) -> None:
        self.point = point
        self._local_node = local_node
        self._clients: dict[str, BlockClient] = {local_node: local}
        self._own_clients: list[SidecarClient] = []
        self._addresses, self._key = dict(addresses), key
        self._maps, self._owns_maps, self._ahead = maps or SlotMaps(), maps is None, ahead
        self._poll, self._cores = poll or (lambda: None), cores
        self._run = run_digest(point.world.run)
        self._opening: _Opening | None = None
        self._blocks: dict[int, _Block] | None = None
        self._lock = threading.Lock()
        self._meters = Meters()
        self.faults: list[ReadFault] = []
        self.touched = False
        self.sent_bytes = 0
        nodes = sorted({source.node for source in point.sources})
        self.origin = (
            f"step {point.step} (generation {point.world.generation}) in the memory of "
            f"{', '.join(nodes)}"
        )

    @property
    def how(self) -> str:
        """Return in words the source of each rank's block, for the event log."""
        parts = []
        for block in self._opened().values():
            way = "mapped from" if block.slot is not None else "sent by"
            way = f"rebuilt from parity, {way}" if block.source.rebuilt else way
            parts.append(f"rank {block.source.rank} {way} {block.source.node}")
        return "; ".join(parts)

    def tiers(self) -> dict[str, dict[str, float]]:
        """Return the bytes that came from each of `TIERS`, and the seconds of work in threads."""
        status = self._meters.status()
        return {
            tier: {"bytes": status[tier]["bytes"], "seconds": status[tier]["seconds"]}
            for tier in TIERS
            if tier in status
        }

    @property
    def elsewhere(self) -> frozenset[int]:
        """The ranks whose blocks are not mapped here."""
        return frozenset(rank for rank, block in self._opened().items() if block.payload is None)

    # -- opening ---------------------------------------------------------------------------------

    def indexes(self) -> Sequence[ShardIndex]:
        """Return every rank's index; those of lost blocks are decoded from parity.

        Raises ``PeerError``, ``NotFoundError`` or ``CorruptError`` if a block is unavailable.
        """
        return [block.index for block in self._opened().values()]

    def __enter__(self) -> Self:
        """Begin to open the blocks; `indexes` waits for them."""
        if self._blocks is None and self._opening is None:
            self._opening = self._begin(self.point.sources, in_parts=True)
        return self

    def _opened(self) -> dict[int, _Block]:
        if self._blocks is None:
            opening, self._opening = self._opening, None
            blocks = self._finish(opening or self._begin(self.point.sources, in_parts=True))
            self._blocks = {block.source.rank: block for block in blocks}
        return self._blocks

    def _begin(self, sources: Sequence[BlockSource], *, in_parts: bool) -> _Opening:
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-open")
        return pool, [pool.submit(self._open, each, in_parts) for each in sources]

    def _finish(self, opening: _Opening) -> list[_Block]:
        pool, futures = opening
        try:
            return self._await_all(futures)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, refs: Sequence[ChunkRef]) -> dict[int, _Block]:
        """Return the blocks; lost ones are rebuilt whole if ``refs`` need much of them."""
        blocks, wanted = self._opened(), dict.fromkeys(self._opened(), 0)
        for ref in refs:
            wanted[ref.writer] += ref.chunk.nbytes
        much = [
            block.source
            for rank, block in blocks.items()
            if block.in_parts and wanted[rank] * _WHOLE_FROM > block.index.payload_bytes
        ]
        if much:
            whole = self._finish(self._begin(much, in_parts=False))
            blocks.update((each.source.rank, each) for each in whole)
        return blocks

    def _await_all(self, futures: Sequence[Future[_Block]]) -> list[_Block]:
        """Return every result; after a failure the others have a moment to fail as well."""
        pending, failed_s = set(futures), None
        while pending:
            done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            self._poll()
            now_s = time.monotonic()
            if failed_s is None and any(future.exception() for future in done):
                failed_s = now_s
            if failed_s is not None and now_s > failed_s + _OTHERS_S:
                break
        finished = [future for future in futures if future.done()]
        return [future.result() for future in sorted(finished, key=lambda f: not f.exception())]

    def _client(self, node: str) -> BlockClient:
        with self._lock:
            if node not in self._clients:
                if node not in self._addresses:
                    raise PeerError(
                        f"{self.origin}: no address of node {node} is known; choose a restore "
                        "point among the living nodes"
                    )
                client = SidecarClient(self._addresses[node], self._key)
                self._own_clients.append(client)
                self._clients[node] = client
            return self._clients[node]

    def _open(self, source: BlockSource, in_parts: bool) -> _Block:
        began_s = time.perf_counter()
        with self._blaming(source):
            client = self._client(source.node)
            handle = client.open_block(
                self.point.world, self.point.step, source, in_parts=in_parts and source.rebuilt
            )
            origin = f"{self.origin}: block of rank {source.rank}"
            index = decode_index(handle.index, origin=origin)
            wanted = (self.point.world.generation, self.point.step, source.rank)
            found = (offered_under(index, wanted[0]), index.step, index.writer)
            if found != wanted:
                raise CorruptError(
                    f"{origin}: it is (generation, step, rank) {found}, not {wanted}; use another "
                    "restore point"
                )
            here = handle.host in ("", self._maps.host)
            slot, header = self._map(handle.path, wanted) if here else (None, None)
        if self._ahead is not None and slot is None:
            with contextlib.suppress(CkptError):  # without a comparison, everything is fetched
                compare(self._ahead, self.point, source, client)
        tier = "disk" if handle.on_disk else "parity" if source.rebuilt else ""
        tier = tier or ("arena" if source.node == self._local_node else "peer")
        self._meters.add(tier, time.perf_counter() - began_s)
        return _Block(
            source=source,
            index=index,
            client=client,
            tier=tier,
            slot=slot,
            header=header,
            payload=slot.block(index.payload_bytes) if slot is not None else None,
            in_parts=handle.in_parts,
        )

    def _map(
        self, path: str, wanted: tuple[int, int, int]
    ) -> tuple[SlotFile, SlotHeader] | tuple[None, None]:
        """Map the slot if its file is on this host and holds the wanted block."""
        if not path or not Path(path).exists():
            return None, None
        try:
            slot = self._maps.open(path, warm=False)
        except (PeerError, CorruptError):
            return None, None
        header = slot.read_header(run=self._run)
        if header is None or header.state < SlotState.SEALED:
            return None, None
        if (header.generation, header.step, header.rank) != wanted:
            return None, None
        return slot, header

    # -- faults ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _blaming(self, source: BlockSource) -> Iterator[None]:
        """Record an error of the body as a fault of this block."""
        try:
            yield
        except (CapacityError, CorruptError, NotFoundError, PeerError) as error:
            fault = ReadFault(
                rank=source.rank, node=source.node, kind=_kind_of(error), reason=str(error)
            )
            with self._lock:
                self.faults.append(fault)
            raise

    def faults_of(self, error: CkptError) -> list[ReadFault]:
        """Return the faults that ended a restore: of blocks, or else of the whole point."""
        with self._lock:
            if self.faults:
                return list(self.faults)
        whole = ReadFaultKind.DAMAGED
        return [ReadFault(rank=WHOLE_POINT, node="", kind=whole, reason=f"{error}")]

    def distrust(self) -> None:
        """Ask the holders of damaged blocks to rebuild them at the next request.

        A holder that cannot be reached is left as it is.
        """
        for fault in self.faults_of(CkptError()):
            if fault.kind is ReadFaultKind.DAMAGED and fault.rank != WHOLE_POINT:
                with contextlib.suppress(CkptError):
                    self._client(fault.node).distrust(self.point.world, self.point.step, fault.rank)

    # -- reading ---------------------------------------------------------------------------------

    def read(self, refs: Sequence[ChunkRef]) -> Iterator[tuple[ChunkRef, memoryview]]:
        """Yield the verified bytes of each chunk, in the order of the request.

        Raises ``CorruptError`` for a failed checksum. Raises ``NotFoundError``, possibly only at
        the end, when a mapped slot was reused meanwhile: discard all bytes read before.
        """
        blocks = self._complete(refs)
        for batch in cut([(ref, []) for ref in refs], BATCH_BYTES):
            block = blocks[batch[0][0].writer]
            with self._blaming(block.source):
                for (ref, _), part in zip(batch, self._fetch(block, batch), strict=True):
                    self._require(ref, crc32c(part))
                    yield ref, part
        self._check_undisturbed({ref.writer for ref in refs})

    def scatter(self, deliveries: ByChunk) -> int:
        """Copy verified regions to their destinations; return the bytes read.

        Raises as `read` does; do not use the targets then.
        """
        here, there = self._prefetched(deliveries)
        blocks = self._complete([ref for ref, _ in there])
        tasks = [(blocks[run[0][0].writer], run) for run in cut(there, _RUN_BYTES)]
        for run in cut(here, _RUN_BYTES):
            block = blocks[run[0][0].writer]
            tasks.append((replace(block, tier=TIERS[1], prefetched=True, payload=None), run))
        self.touched = True
        total = sum(ref.chunk.nbytes for ref, _ in deliveries)
        inline = self._cores == 1 or total <= _INLINE_BYTES
        if inline and all(block.payload is not None for block, _ in tasks):
            for block, run in tasks:
                self._poll()
                self._land(block, run, self._fetch(block, run))
        else:
            self._land_all(tasks)
        self._check_undisturbed({ref.writer for ref, _ in deliveries})
        return total

    def _prefetched(self, deliveries: ByChunk) -> tuple[list[Delivery], list[Delivery]]:
        """Return the deliveries that are prefetched, as far as known, and the others."""
        ahead, key = self._ahead, (self.point.world.generation, self.point.step)
        if ahead is None:
            return [], list(deliveries)
        found: tuple[list[Delivery], list[Delivery]] = ([], [])
        away = self.elsewhere
        for delivery in deliveries:
            ref = delivery[0]
            found[0 if ref.writer in away and ahead.has(key, ref) else 1].append(delivery)
        return found

    def _land_all(self, tasks: Sequence[_Task]) -> None:
        """Fetch and land on threads; after return or raise no thread writes to any target."""
        fetch = ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-read")
        land = ThreadPoolExecutor(min(self._cores, LAND_THREADS), thread_name_prefix="ckpt-land")
        here = deque(task for task in tasks if task[0].payload is not None)
        there = deque(task for task in tasks if task[0].payload is None)
        landing: set[Future[Any]] = set()
        fetching: dict[Future[Any], _Task] = {}
        failed: BaseException | None = None
        try:
            while landing or here or ((fetching or there) and failed is None):
                while there and len(fetching) < _AHEAD and failed is None:
                    task = there.popleft()
                    fetching[fetch.submit(self._fetch, *task)] = task
                while here and len(landing) < _LANDING_AHEAD:
                    block, run = here.popleft()
                    landing.add(land.submit(self._land, block, run, self._fetch(block, run)))
                soon = FIRST_COMPLETED if fetching else ALL_COMPLETED  # else there is work enough
                wait([*landing, *fetching], _POLL_S, return_when=soon)
                self._poll()
                for landed in [future for future in landing if future.done()]:
                    landing.discard(landed)
                    failed = failed or landed.exception()
                for fetched in [future for future in fetching if future.done()]:
                    task, failed = fetching.pop(fetched), failed or fetched.exception()
                    if failed is None:
                        landing.add(land.submit(self._land, *task, fetched.result()))
        finally:
            fetch.shutdown(wait=False, cancel_futures=True)
            land.shutdown(wait=True, cancel_futures=True)
        if failed is not None:
            raise failed

    def _fetch(self, block: _Block, run: Sequence[Delivery]) -> list[memoryview]:
        """Return the bytes of chunks: views of the mapped slot, or bytes from its sidecar."""
        if block.payload is not None:
            return [block.payload[r.chunk.at : r.chunk.at + r.chunk.nbytes] for r, _ in run]
        if block.prefetched and self._ahead is not None:
            key = (self.point.world.generation, self.point.step)
            taken = [self._ahead.take(key, ref) for ref, _ in run]
            whole = [part for part in taken if part is not None]
            return whole if len(whole) == len(run) else self._ask(block, run)
        return self._ask(block, run)

    def _ask(self, block: _Block, run: Sequence[Delivery]) -> list[memoryview]:
        """Return the bytes of chunks from the block's sidecar."""
        if block.in_parts:
            return self._fetch_lost(block, run)
        began_s, point = time.perf_counter(), self.point
        ranges = [(ref.chunk.at, ref.chunk.nbytes) for ref, _ in run]
        with self._blaming(block.source):
            parts = block.client.read(point.world, point.step, block.source.rank, ranges)
        self._meters.add(block.tier, time.perf_counter() - began_s)
        with self._lock:
            self.sent_bytes += sum(nbytes for _, nbytes in ranges)
        return parts

    def _fetch_lost(self, block: _Block, run: Sequence[Delivery]) -> list[memoryview]:
        """Return chunks of a lost block; rebuild it whole where its parts fail their checksums."""
        began_s, point = time.perf_counter(), self.point
        ranges = [(ref.chunk.at, ref.chunk.nbytes) for ref, _ in run]
        with contextlib.suppress(CkptError):  # then the whole block is rebuilt, or raises
            parts = block.client.read(point.world, point.step, block.source.rank, ranges)
            sums = [ref.chunk.crc32c for ref, _ in run]
            if [crc32c(part) for part in parts] == sums:
                self._meters.add(block.tier, time.perf_counter() - began_s)
                return parts
        whole = self._open(block.source, False)
        with self._lock:
            self._opened()[block.source.rank] = whole
        return self._fetch(whole, run)

    def _land(self, block: _Block, run: Sequence[Delivery], parts: Sequence[memoryview]) -> None:
        began_s, nbytes = time.perf_counter(), 0
        with self._blaming(block.source):
            block.fill_pages(run)
            for (ref, regions), part in zip(run, parts, strict=True):
                whole = ref.chunk.box.size * regions[0][1].itemsize
                if part.nbytes != ref.chunk.nbytes or part.nbytes != whole:
                    raise self._damaged(ref)
                nbytes += part.nbytes
            for (ref, _), crc in zip(run, copy_chunks(run, parts), strict=True):
                self._require(ref, crc)
        self._meters.add(block.tier, time.perf_counter() - began_s, nbytes)

    def _require(self, ref: ChunkRef, crc: int) -> None:
        if crc != ref.chunk.crc32c:
            raise self._damaged(ref)

    def _damaged(self, ref: ChunkRef) -> CorruptError:
        return CorruptError(
            f"{self.origin}: {ref.fqn} of rank {ref.writer} fails its checksum; "
            "use another restore point"
        )

    def _check_undisturbed(self, writers: set[int]) -> None:
        """Make sure that no mapped slot was given to a newer snapshot while it was read."""
        for writer in sorted(writers):
            block = self._opened()[writer]
            if block.slot is None or block.header is None:
                continue
            now = block.slot.read_header(run=self._run)
            with self._blaming(block.source):
                if (
                    now is None
                    or now.entry() != block.header.entry()
                    or now.state < SlotState.SEALED
                ):
                    raise NotFoundError(
                        f"{self.origin}: rank {writer}'s slot was used again while it was read; "
                        "locate a newer step and read that"
                    )

    def close(self) -> None:
        """Close this source's own clients and mappings."""
        self._blocks = {}
        if self._opening is not None:
            self._opening[0].shutdown(wait=False, cancel_futures=True)
        for client in self._own_clients:
            client.close()
        if self._owns_maps:
            self._maps.close_later()


def _kind_of(error: CkptError) -> ReadFaultKind:
    """Return the fault for an error: a peer that answers, even with an error, is reachable."""
    if isinstance(error, CorruptError):
        return ReadFaultKind.DAMAGED
    if isinstance(error, PeerError) and not error.peer_code:
        return ReadFaultKind.UNREACHABLE
    return ReadFaultKind.MISSING
