"""Read a snapshot out of the sidecars' memory: mapped where it lies here, else over the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from ckpt.arena import SlotFile, SlotHeader, run_digest
from ckpt.block import SlotState
from ckpt.closing import Closing
from ckpt.errors import CorruptError, NotFoundError, PeerError
from ckpt.index import ChunkRef, ShardIndex, decode_index
from ckpt.isal import crc32c
from ckpt.maps import SlotMaps
from ckpt.scatter import ByChunk, scatter_whole
from ckpt.sidecar.client import BlockHandle, SidecarClient
from ckpt.transport import RunKey
from ckpt.world import BlockSource, RestorePoint, SnapshotWorld

BATCH_BYTES: Final = 16 << 20
_AHEAD: Final = 3
_THREADS: Final = 4


class BlockClient(Protocol):
    """What a MemorySource needs of a ``SidecarClient``."""

    def open_block(self, world: SnapshotWorld, step: int, source: BlockSource) -> BlockHandle: ...

    def read(
        self, world: SnapshotWorld, step: int, rank: int, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """An opened block; ``slot`` and its ``header`` where it is mapped, else read at ``client``."""

    source: BlockSource
    index: ShardIndex
    client: BlockClient
    slot: SlotFile | None
    header: SlotHeader | None
    payload: memoryview | None


class MemorySource(Closing):
    """A `ShardSource` over the blocks that a restore point names.

    ``local`` is the client of ``local_node``'s sidecar; ``addresses`` tells where the others
    are. Blocks whose slot file is on this host are mapped (through ``maps``, which may be shared
    to stay warm), unless ``mapped`` is False. Safe for one reader at a time.
    """

    def __init__(
        self,
        point: RestorePoint,
        *,
        local: BlockClient,
        local_node: str,
        addresses: Mapping[str, str],
        key: RunKey,
        maps: SlotMaps | None = None,
        mapped: bool = True,
    ) -> None:
        self.point = point
        self._clients: dict[str, BlockClient] = {local_node: local}
        self._own_clients: list[SidecarClient] = []
        self._addresses, self._key = dict(addresses), key
        self._maps, self._owns_maps, self._mapped = maps or SlotMaps(), maps is None, mapped
        self._run = run_digest(point.world.run)
        self._blocks: dict[int, _Block] | None = None
        nodes = sorted({source.node for source in point.sources})
        self.origin = (
            f"step {point.step} (generation {point.world.generation}) in the memory of "
            f"{', '.join(nodes)}"
        )

    @property
    def how(self) -> str:
        """Say where each rank's block comes from, for the event log."""
        parts = []
        for block in self._opened().values():
            way = "mapped from" if block.slot is not None else "sent by"
            way = f"rebuilt from parity, {way}" if block.source.rebuilt else way
            parts.append(f"rank {block.source.rank} {way} {block.source.node}")
        return "; ".join(parts)

    def indexes(self) -> Sequence[ShardIndex]:
        """Return every rank's index; lost blocks are rebuilt from parity first.

        Raises ``PeerError``, ``NotFoundError`` or ``CorruptError`` where a block is not to be had.
        """
        return [block.index for block in self._opened().values()]

    def _opened(self) -> dict[int, _Block]:
        if self._blocks is None:
            for source in self.point.sources:
                self._client(source.node)
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-open") as pool:
                blocks = list(pool.map(self._open, self.point.sources))
            self._blocks = {block.source.rank: block for block in blocks}
        return self._blocks

    def _client(self, node: str) -> BlockClient:
        if node not in self._clients:
            if node not in self._addresses:
                raise PeerError(
                    f"{self.origin}: no address of node {node} is known; choose a restore point "
                    "among the living nodes"
                )
            client = SidecarClient(self._addresses[node], self._key)
            self._own_clients.append(client)
            self._clients[node] = client
        return self._clients[node]

    def _open(self, source: BlockSource) -> _Block:
        client = self._clients[source.node]
        handle = client.open_block(self.point.world, self.point.step, source)
        origin = f"{self.origin}: block of rank {source.rank}"
        index = decode_index(handle.index, origin=origin)
        said = (index.generation, index.step, index.writer)
        wanted = (self.point.world.generation, self.point.step, source.rank)
        if said != wanted:
            raise CorruptError(f"{origin}: it is (generation, step, rank) {said}, not {wanted}")
        slot, header = self._map(handle.path, wanted) if self._mapped else (None, None)
        return _Block(
            source=source,
            index=index,
            client=client,
            slot=slot,
            header=header,
            payload=slot.block(index.payload_bytes) if slot is not None else None,
        )

    def _map(
        self, path: str, wanted: tuple[int, int, int]
    ) -> tuple[SlotFile, SlotHeader] | tuple[None, None]:
        """Map the slot if its file is on this host and is the one meant."""
        if not path or not Path(path).exists():
            return None, None
        try:
            slot = self._maps.open(path)
        except (PeerError, CorruptError):
            return None, None
        header = slot.read_header(run=self._run)
        if header is None or header.state < SlotState.SEALED:
            return None, None
        if (header.generation, header.step, header.rank) != wanted:
            return None, None
        return slot, header

    def read(self, refs: Sequence[ChunkRef]) -> Iterator[tuple[ChunkRef, memoryview]]:
        """Yield the verified bytes of each chunk, in the order asked.

        Raises ``CorruptError`` for a failed checksum; ``NotFoundError``, possibly only at the
        end, when a mapped slot was put to another use meanwhile: what was read before is void.
        """
        blocks = self._opened()
        waiting = deque(_batches(refs))
        ahead: deque[tuple[list[ChunkRef], Future[list[memoryview]] | None]] = deque()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-read") as pool:
            try:
                while waiting or ahead:
                    while waiting and len(ahead) < _AHEAD:
                        batch = waiting.popleft()
                        block = blocks[batch[0].writer]
                        remote = block.payload is None
                        ahead.append(
                            (batch, pool.submit(self._fetch, block, batch) if remote else None)
                        )
                    batch, future = ahead.popleft()
                    block = blocks[batch[0].writer]
                    parts = future.result() if future else _views(block, batch)
                    for ref, part in zip(batch, parts, strict=True):
                        yield ref, self._verified(ref, part)
            finally:
                for _, future in ahead:
                    if future is not None:
                        future.cancel()
        self._check_undisturbed({ref.writer for ref in refs})

    def scatter(self, deliveries: ByChunk) -> int:
        """Bring verified regions to where they belong; return the bytes read. Raises as `read`."""
        return scatter_whole(self.read, deliveries)

    def _fetch(self, block: _Block, batch: Sequence[ChunkRef]) -> list[memoryview]:
        ranges = [(ref.chunk.at, ref.chunk.nbytes) for ref in batch]
        point = self.point
        return block.client.read(point.world, point.step, block.source.rank, ranges)

    def _verified(self, ref: ChunkRef, part: memoryview) -> memoryview:
        if part.nbytes != ref.chunk.nbytes or crc32c(part) != ref.chunk.crc32c:
            raise CorruptError(
                f"{self.origin}: {ref.fqn} of rank {ref.writer} fails its checksum; "
                "use another restore point"
            )
        return part

    def _check_undisturbed(self, writers: set[int]) -> None:
        """Make sure that no mapped slot was given to a newer snapshot while it was read."""
        for writer in writers:
            block = self._opened()[writer]
            if block.slot is None or block.header is None:
                continue
            now = block.slot.read_header(run=self._run)
            if now is None or now.entry() != block.header.entry() or now.state < SlotState.SEALED:
                raise NotFoundError(
                    f"{self.origin}: rank {writer}'s slot was used again while it was read; "
                    "locate a newer step and read that"
                )

    def close(self) -> None:
        """Close the clients and mappings that are this source's own."""
        self._blocks = {}
        for client in self._own_clients:
            client.close()
        if self._owns_maps:
            self._maps.close()


def _views(block: _Block, batch: Sequence[ChunkRef]) -> list[memoryview]:
    assert block.payload is not None
    return [block.payload[r.chunk.at : r.chunk.at + r.chunk.nbytes] for r in batch]


def _batches(refs: Sequence[ChunkRef]) -> Iterator[list[ChunkRef]]:
    """Cut ``refs`` into runs of one writer of at most `BATCH_BYTES` (or a single chunk)."""
    batch: list[ChunkRef] = []
    size = 0
    for ref in refs:
        full = size + ref.chunk.nbytes > BATCH_BYTES
        if batch and (full or batch[0].writer != ref.writer):
            yield batch
            batch, size = [], 0
        batch.append(ref)
        size += ref.chunk.nbytes
    if batch:
        yield batch
