"""The places of stored chunks, read tensor by tensor when DCP's planner asks for them.

A step of many writers lists its chunks in a register. The names, dtypes and shapes of its tensors
are known without it, and a rank reads the entries of those that it loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, TypeAlias, cast, overload

import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.ckpt.checkpoints.assemble import TensorChunks, parts_of
from holdfast.ckpt.checkpoints.source import PackSource, StoreSource
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.grid import fault_of_cover
from holdfast.ckpt.geometry.reshard import Copy, chunk_key
from holdfast.ckpt.geometry.shard_index import ChunkRef
from holdfast.ckpt.state import torch_dtypes

Array: TypeAlias = npt.NDArray[Any]
Delivery: TypeAlias = tuple[Copy, Array]

_MOST_AHEAD: Final = 256


class StoredPlaces:
    """The chunks of a step's tensors; ``names`` maps DCP's names to the stored ones.

    Not safe to share between threads. The entries of neighbours are read along, more of them each
    time, so that a reader of many tensors asks the store a few times.
    """

    def __init__(self, source: StoreSource, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names
        self._waiting = dict.fromkeys(sorted({*names.values()}))
        self._ahead = 1
        self._parts: dict[str, tuple[TensorChunks, PackSource]] = {}
        self._refs: dict[str, dict[tuple[int, ...], ChunkRef]] = {}
        if source.register is None:  # then all places were read when the step was opened
            self._take(source, list(self._waiting))

    def described(self) -> dict[str, TensorStorageMetadata]:
        """Return all tensors as DCP describes them; places of chunks are read once asked for."""
        manifest = self._source.head
        found = {}
        for name, stored in self._names.items():
            record = manifest.tensors[stored]
            dtype = dtype_of(record.dtype, origin=f"{self._source.origin}: tensor {stored}")
            found[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=torch_dtypes.BY_NAME[dtype.name]),
                size=torch.Size(record.shape),
                chunks=cast("list[ChunkStorageMetadata]", _Chunks(self, stored)),
            )
        return found

    def chunks(self, stored: str) -> tuple[ChunkRef, ...]:
        """Return all chunks of a stored tensor."""
        if stored not in self._parts:
            self._read(stored)
        return self._parts[stored][0].chunks

    def ref(self, index: MetadataIndex) -> ChunkRef:
        """Return the chunk that DCP names so. Raises ``KeyError`` if there is none."""
        stored = self._names[index.fqn]
        if stored not in self._refs:
            chunks = self.chunks(stored)
            self._refs[stored] = {ref.chunk.box.offset: ref for ref in chunks}
        return self._refs[stored][tuple(index.offset or ())]

    def scatter(self, deliveries: Sequence[Delivery]) -> None:
        """Read the regions of all copies into their arrays; each chunk is read once."""
        of_sources: dict[int, tuple[PackSource, list[Delivery]]] = {}
        for delivery in deliveries:
            source = self._parts[delivery[0].ref.fqn][1]
            of_sources.setdefault(id(source), (source, []))[1].append(delivery)
        for source, some in of_sources.values():
            scatter(source, some)

    def _read(self, stored: str) -> None:
        """Read the entries of a tensor, and of some of those that follow it in its part of all."""
        first = stored.partition(".")[0]
        some = [stored]
        for name in self._after(stored):
            if len(some) >= self._ahead or name.partition(".")[0] != first:
                break
            some.append(name)
        self._ahead = min(2 * self._ahead, _MOST_AHEAD)
        self._take(self._source.tensors(some), some)

    def _after(self, stored: str) -> Iterator[str]:
        names = iter(self._waiting)
        for name in names:
            if name == stored:
                break
        yield from names

    def _take(self, source: PackSource, names: Iterable[str]) -> None:
        parts = parts_of(source.indexes(), origin=source.origin)
        for name in names:
            found = parts[name]
            if fault := fault_of_cover(found.shape, [ref.chunk.box for ref in found.chunks]):
                raise CorruptError(
                    f"{source.origin}: tensor {name}: {fault}; load another step, or restore its "
                    "files from a copy"
                )
            self._parts[name] = found, source
            del self._waiting[name]


class _Chunks(Sequence[ChunkStorageMetadata]):
    """A tensor's chunks as DCP describes them, read when one of them is asked for."""

    def __init__(self, places: StoredPlaces, stored: str) -> None:
        self._places, self._stored = places, stored
        self._known: list[ChunkStorageMetadata] | None = None

    @overload
    def __getitem__(self, index: int) -> ChunkStorageMetadata: ...

    @overload
    def __getitem__(self, index: slice) -> list[ChunkStorageMetadata]: ...

    def __getitem__(self, index: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        return self._all()[index]

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[ChunkStorageMetadata]]]:
        return list, (self._all(),)  # the description goes elsewhere without the open step

    def _all(self) -> list[ChunkStorageMetadata]:
        if self._known is None:
            self._known = [
                ChunkStorageMetadata(
                    offsets=torch.Size(ref.chunk.box.offset), sizes=torch.Size(ref.chunk.box.shape)
                )
                for ref in self._places.chunks(self._stored)
            ]
        return self._known


def scatter(source: PackSource, deliveries: Sequence[Delivery]) -> None:
    """Read the regions of all copies into their arrays; each chunk is read once."""
    ordered = sorted(deliveries, key=lambda delivery: chunk_key(delivery[0].ref))
    groups = [list(group) for _, group in groupby(ordered, key=lambda one: chunk_key(one[0].ref))]
    source.scatter(
        [(group[0][0].ref, [(copy.src, target) for copy, target in group]) for group in groups]
    )
