"""Assembly of any box of a tensor from a source's chunks, as numpy, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.geometry.element_types import DType, dtype_of
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.scatter import ByChunk
from holdfast.ckpt.geometry.shard_index import ChunkRef, ShardIndex

Array: TypeAlias = npt.NDArray[Any]


class Chunks(Protocol):
    """The part of a source of shards that this module needs."""

    origin: str

    def indexes(self) -> Sequence[ShardIndex]:
        """Return the index of every writer."""

    def scatter(self, deliveries: ByChunk) -> int:
        """Read regions of chunks into their destinations, verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChunks:
    """A tensor with all its chunks, from all writers."""

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[ChunkRef, ...]


def parts_of(indexes: Sequence[ShardIndex], *, origin: str) -> dict[str, TensorChunks]:
    """Collect the chunks of each tensor. Raises ``CorruptError`` if writers disagree."""
    chunks: dict[str, list[ChunkRef]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for index in indexes:
        for fqn, entry in index.tensors.items():
            kind = kinds.setdefault(fqn, (entry.dtype, entry.shape))
            if kind != (entry.dtype, entry.shape):
                raise CorruptError(
                    f"{origin}: tensor {fqn}: writer {index.writer} has {entry.dtype} "
                    f"{entry.shape}, another {kind[0]} {kind[1]}"
                )
            chunks.setdefault(fqn, [])
        for ref in index.chunks():
            chunks[ref.fqn].append(ref)
    return {
        fqn: TensorChunks(
            fqn=fqn,
            dtype=dtype_of(dtype, origin=f"{origin}: tensor {fqn}"),
            shape=shape,
            chunks=tuple(chunks[fqn]),
        )
        for fqn, (dtype, shape) in kinds.items()
    }


class Assembler:
    """Assembles boxes from the chunks of a source."""

    def __init__(self, source: Chunks) -> None:
        self._source = source
        self.tensors: Mapping[str, TensorChunks] = parts_of(source.indexes(), origin=source.origin)

    def box(self, fqn: str, box: Box | None = None) -> Array:
        """Return a box of a tensor (all of it for None) in the numpy view of its dtype.

        Raises ``NotFoundError`` for an unknown tensor, ``CorruptError`` if bytes are damaged
        or missing.
        """
        try:
            parts = self.tensors[fqn]
        except KeyError:
            raise NotFoundError(
                f"{self._source.origin}: no tensor {fqn!r}; it holds {len(self.tensors)} others, "
                "see .keys()"
            ) from None
        wanted = whole(parts.shape) if box is None else box
        out: Array = np.empty(wanted.shape, dtype=parts.dtype.numpy)
        shared = {
            (ref.writer, ref.chunk.at): common
            for ref in parts.chunks
            if (common := ref.chunk.box.intersect(wanted))
        }
        filled = sum(common.size for common in shared.values())
        if filled != wanted.size:
            raise CorruptError(
                f"{self._source.origin}: tensor {fqn}: {filled} of {wanted.size} elements were "
                "saved"
            )
        self._source.scatter(
            [
                (ref, [(common.within(ref.chunk.box), out[common.within(wanted).slices])])
                for ref in parts.chunks
                if (common := shared.get((ref.writer, ref.chunk.at)))
            ]
        )
        return out

    def bytes(self, fqn: str, box: Box | None = None) -> memoryview:
        """Return a box's elements as bytes."""
        return self.box(fqn, box).reshape(-1).view(np.uint8).data
