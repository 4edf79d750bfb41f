"""A source of shards seen through patterns: for a load into a live state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.convert.checkpoint import CheckpointSource
from holdfast.ckpt.convert.interchange import PIECE_BYTES, cut, itemsize_of
from holdfast.ckpt.convert.patterns.choice import Patterns
from holdfast.ckpt.convert.patterns.source import PatternedSource
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.geometry.scatter import ByChunk
from holdfast.ckpt.geometry.shard_index import Chunk, ChunkRef, ShardIndex, TensorEntry


class PatternedShards:
    """Shows the tensors that patterns make of a checkpoint's as the shards of one writer.

    Padding and this rank's share of the replicas are compared at once: if all ranks have done so, a
    load that is refused for them has changed nothing. Raises ``MismatchError`` for a checkpoint
    with values of single ranks.
    """

    def __init__(self, source: StoreSource, patterns: Patterns, *, rank: int, ranks: int) -> None:
        if rank_values := next(filter(None, (i.rank_values for i in source.indexes())), None):
            raise MismatchError(
                f"{source.origin}: the value {next(iter(rank_values))} belongs to one rank, and "
                "patterns are for files from elsewhere, which have none; load it without patterns"
            )
        self._made = made = PatternedSource(CheckpointSource(source), patterns)
        self.origin, self.told = made.origin, made.told
        made.check_replicas(rank=rank, ranks=ranks)
        self._indexes = self._described(source.indexes())

    def _described(self, indexes: Sequence[ShardIndex]) -> tuple[ShardIndex, ...]:
        """Return the indexes with the new tensors at the first writer."""
        tensors, at = {}, 0
        for fqn, spec in self._made.specs.items():
            tensors[fqn] = entry = _entry(spec, at)
            at += sum(chunk.nbytes for chunk in entry.chunks)
        found = []
        for number, index in enumerate(indexes):
            found.append(
                ShardIndex(
                    run=index.run,
                    generation=index.generation,
                    step=index.step,
                    writer=index.writer,
                    world_size=index.world_size,
                    payload_bytes=0 if number else at,
                    tensors={} if number else tensors,
                    values={} if number else dict(self._made.values),
                    aliases={} if number else dict(self._made.aliases),
                )
            )
        return tuple(found)

    def indexes(self) -> Sequence[ShardIndex]:
        """Return the index of every writer."""
        return self._indexes

    def read(self, refs: Sequence[ChunkRef]) -> Iterator[tuple[ChunkRef, memoryview]]:
        """Yield the bytes of each chunk, in the order of the request."""
        for ref in refs:
            yield ref, self._made.read(ref.fqn, ref.chunk.box)

    def scatter(self, deliveries: ByChunk) -> int:
        """Read regions of chunks into their destinations; return the bytes read."""
        done = 0
        for ref, regions in deliveries:
            for region, target in regions:
                data = self._made.read(ref.fqn, _placed(region, ref.chunk.box))
                if region.size:
                    found = np.frombuffer(data, target.dtype, count=prod(target.shape))
                    target[...] = found.reshape(target.shape)
                done += data.nbytes
        return done


def _entry(spec: TensorSpec, at: int) -> TensorEntry:
    itemsize, chunks = itemsize_of(spec), []
    for box in cut(whole(spec.shape), itemsize=itemsize, most_bytes=PIECE_BYTES):
        nbytes = box.size * itemsize
        chunks.append(Chunk(box=box, at=at, nbytes=nbytes, crc32c=0))
        at += nbytes
    return TensorEntry(dtype=spec.dtype, shape=spec.shape, chunks=tuple(chunks))


def _placed(region: Box, chunk: Box) -> Box:
    """Return a region of a chunk as a box of the tensor."""
    offset = tuple(r + c for r, c in zip(region.offset, chunk.offset, strict=True))
    return Box(offset=offset, shape=region.shape)


def shards_of(
    source: StoreSource, patterns: Patterns | None, *, rank: int, ranks: int
) -> tuple[StoreSource | PatternedShards, tuple[str, ...]]:
    """Return the source, or what the patterns make of it, with the words about what is left out."""
    if patterns is None:
        return source, ()
    made = PatternedShards(source, patterns, rank=rank, ranks=ranks)
    return made, made.told
