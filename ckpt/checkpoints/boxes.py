"""Verified reading of any box of any tensor, from many threads at once, in little memory.

Like ``holdfast.ckpt.checkpoints.assemble``, but each call works in the calling thread: a program
that reads boxes of bounded size from a bounded number of threads takes bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.ckpt.checkpoints.assemble import TensorChunks, parts_of
from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.scatter import ByChunk
from holdfast.ckpt.geometry.shard_index import ChunkRef, ShardIndex

Array: TypeAlias = npt.NDArray[Any]

_BATCH_BYTES: Final = 4 << 20
_BATCH_CHUNKS: Final = 64
"""The limits up to which a source reads in one thread: the calling one."""

_LEAST_TILE: Final = 1 << 20
_MOST_TILE: Final = 32 << 20


class ChunkFiles(Protocol):
    """The part of a source of shards that this module needs; safe to share between threads."""

    origin: str

    def indexes(self) -> Sequence[ShardIndex]:
        """Return the index of every writer."""

    def scatter(self, deliveries: ByChunk) -> int:
        """Read regions of chunks into their destinations, verified."""


class BoxReader:
    """Reads boxes of the tensors of a source; safe to share between threads."""

    def __init__(self, source: ChunkFiles) -> None:
        self._source = source
        self.tensors: dict[str, TensorChunks] = parts_of(source.indexes(), origin=source.origin)
        self._extents: dict[str, tuple[Array, Array]] = {}

    def cell(self, fqn: str) -> tuple[int, ...]:
        """Return the largest extent per dim of the tensor's chunks; 1 if there are none."""
        shapes = [ref.chunk.box.shape for ref in self.tensors[fqn].chunks]
        if not shapes:
            return (1,) * len(self.tensors[fqn].shape)
        return tuple(max(*extents, 1) for extents in zip(*shapes, strict=True))

    def box(self, fqn: str, box: Box) -> Array:
        """Return a box of a tensor, in the numpy view of its dtype, as newly allocated memory.

        Raises ``NotFoundError`` for an unknown tensor, ``CorruptError`` if bytes are damaged or
        missing.
        """
        if (parts := self.tensors.get(fqn)) is None:
            raise NotFoundError(f"{self._source.origin}: no tensor {fqn!r}; see `holdfast inspect`")
        out: Array = np.empty(box.shape, dtype=parts.dtype.numpy)
        batch: list[tuple[ChunkRef, list[tuple[Box, Array]]]] = []
        filled = nbytes = 0
        for ref, common in self._overlaps(parts, box) if box.size else ():
            target = out[common.within(box).slices]
            batch.append((ref, [(common.within(ref.chunk.box), target)]))
            filled, nbytes = filled + common.size, nbytes + ref.chunk.nbytes
            if nbytes >= _BATCH_BYTES or len(batch) >= _BATCH_CHUNKS:
                self._source.scatter(batch)
                batch, nbytes = [], 0
        if filled != box.size:
            raise CorruptError(
                f"{self._source.origin}: tensor {fqn}: {filled} of {box.size} elements were "
                "saved; load another step"
            )
        self._source.scatter(batch)
        return out

    def _overlaps(self, parts: TensorChunks, box: Box) -> Iterator[tuple[ChunkRef, Box]]:
        """Yield the chunks that overlap ``box``, each with the overlap."""
        low, high = self._extent(parts)
        start = np.array(box.offset, dtype=np.int64)
        end = start + np.array(box.shape, dtype=np.int64)
        for number in np.flatnonzero(((low < end) & (high > start)).all(axis=1)):
            ref = parts.chunks[int(number)]
            if common := ref.chunk.box.intersect(box):
                yield ref, common

    def _extent(self, parts: TensorChunks) -> tuple[Array, Array]:
        """Return the corners of a tensor's chunks, one row each."""
        known = self._extents.get(parts.fqn)
        if known is None:
            shape = (len(parts.chunks), len(parts.shape))
            boxes = [ref.chunk.box for ref in parts.chunks]
            low = np.array([box.offset for box in boxes], dtype=np.int64).reshape(shape)
            size = np.array([box.shape for box in boxes], dtype=np.int64).reshape(shape)
            known = self._extents[parts.fqn] = (low, low + size)
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBudget:
    """The number of reading threads and the size of their boxes, within a bound on memory."""

    threads: int
    tile_bytes: int


def budget(memory_bytes: int, *, threads: int, largest_chunk: int, sources: int = 1) -> ReadBudget:
    """Divide ``memory_bytes`` between threads that each hold a box and a chunk per source.

    A compressed chunk is read whole, so the minimum is one thread with the largest chunk.
    """
    least = sources * (largest_chunk + _LEAST_TILE)
    used = max(1, min(threads, memory_bytes // least))
    room = memory_bytes // used // sources - largest_chunk
    return ReadBudget(threads=used, tile_bytes=max(_LEAST_TILE, min(room, _MOST_TILE)))


def largest_chunk(tensors: Iterable[TensorChunks]) -> int:
    """Return the size of the largest chunk of all ``tensors``, 0 if there is none."""
    return max((ref.chunk.nbytes for parts in tensors for ref in parts.chunks), default=0)
