"""Shards in this process's memory: capture without a sidecar, restore without a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.ckpt.errors import CorruptError, InternalError
from holdfast.ckpt.format.checked_copy import copy_chunk
from holdfast.ckpt.geometry.scatter import ByChunk
from holdfast.ckpt.geometry.shard_index import ChunkRef, ShardIndex
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.testing.shards import Shard, capture


class _CollectedError(InternalError):
    """Ends the first half of an exchange."""


def capture_world(
    states: Sequence[Mapping[str, Any]], *, step: int = 0, generation: int = 1
) -> list[Shard]:
    """Return the shard of each rank of a world, one state per rank, without other processes.

    Raises ``StateError`` if the ranks would.
    """
    offers: list[Any] = []

    def offer(mine: Any) -> list[Any]:
        offers.append(msgspec.json.decode(msgspec.json.encode(mine)))
        raise _CollectedError

    for rank, state in enumerate(states):
        with suppress(_CollectedError):
            capture(state, rank=rank, world_size=len(states), gather=offer)
    return [
        capture(
            state,
            step=step,
            generation=generation,
            rank=rank,
            world_size=len(states),
            gather=lambda _: offers,
        )
        for rank, state in enumerate(states)
    ]


class MemoryShards:
    """A `ShardSource` over captured shards; ``reads`` counts the bytes requested."""

    def __init__(self, shards: Sequence[Shard], *, origin: str = "test memory") -> None:
        self.origin = origin
        self._shards = {index.writer: (index, payload) for index, payload in shards}
        self.reads = 0

    def indexes(self) -> Sequence[ShardIndex]:
        """Return the indexes in writer order."""
        return [index for _, (index, _) in sorted(self._shards.items())]

    def read(self, refs: Sequence[ChunkRef]) -> Iterator[tuple[ChunkRef, memoryview]]:
        """Yield verified views of the payloads."""
        for ref in refs:
            chunk = ref.chunk
            data = memoryview(self._shards[ref.writer][1])[chunk.at : chunk.at + chunk.nbytes]
            if crc32c(data) != chunk.crc32c:
                raise CorruptError(f"{self.origin}: {ref.fqn} fails its checksum")
            self.reads += chunk.nbytes
            yield ref, data

    def scatter(self, deliveries: ByChunk) -> int:
        """Copy regions of the payloads to their destinations."""
        chunks = self.read([ref for ref, _ in deliveries])
        for (ref, data), (_, regions) in zip(chunks, deliveries, strict=True):
            copy_chunk(ref.chunk, data, regions)
        return sum(ref.chunk.nbytes for ref, _ in deliveries)
