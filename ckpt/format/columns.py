"""The chunks of several indexes as columns, to check and to list all of them at once. Pure.

A commit of many writers meets a million chunks. `read_indexes` makes the checks of `read_index` by
arithmetic on columns. It does not name a fault: then each index is read by itself, which does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from math import prod
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format.codecs import MAX_RATIO, Codec
from holdfast.ckpt.format.manifest import (
    ALIGN,
    CRC_BYTES,
    READ_FORMATS,
    PackedChunk,
    PackedTensor,
    PackIndex,
    WriterRecord,
    faults_of_index,
    is_index_of,
)
from holdfast.ckpt.format.sealed import unseal
from holdfast.ckpt.format.wellformed import fault_of_shape
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.spans import Ints, Spans
from holdfast.ckpt.native.crc import BLOCK_BYTES
from holdfast.ckpt.types import learn

_NONE: Final = -1
"""Stands for None in a column of numbers that are not negative."""

_Facts: TypeAlias = tuple[str, str, tuple[int, ...], tuple[int, ...] | None, Codec | None]

Flags: TypeAlias = NDArray[np.bool_]


class _BareBox(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields of a `Box`, which are checked with their column."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class _BareChunk(PackedChunk, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    box: _BareBox  # type: ignore[assignment]


class _BareTensor(PackedTensor, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    chunks: tuple[_BareChunk, ...]


class _BareIndex(PackIndex, frozen=True, kw_only=True, omit_defaults=True):
    tensors: dict[str, _BareTensor]  # type: ignore[assignment]


class HeldTensor(NamedTuple):
    """The facts about a tensor as an index has them."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    cell: tuple[int, ...] | None
    codec: Codec | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkColumns:
    """The chunks of ``indexes``; the columns have one entry for each of ``chunks``.

    ``holders`` has, per tensor, the number of the first index that has it. ``index`` and ``tensor``
    are numbers of ``indexes`` and of ``tensors``. ``spans`` have the dims of the tensor with the
    most; other boxes have the extent 1 in the further ones. ``padded_bytes`` is the size before any
    codec, ``stored`` that after it; ``stored`` and ``base`` are -1 for None.
    """

    indexes: Sequence[PackIndex]
    tensors: Sequence[HeldTensor]
    holders: Sequence[int]
    chunks: Sequence[PackedChunk]
    index: Ints
    tensor: Ints
    spans: Spans
    at: Ints
    padded: Flags
    padded_bytes: Ints
    stored: Ints
    base: Ints

    @property
    def own(self) -> Flags:
        """A mask of the chunks that lie in the pack of their index, not in a base."""
        return np.equal(self.base, _NONE)

    @property
    def stored_bytes(self) -> Ints:
        """The size of each chunk as stored, without its checksum."""
        return np.where(self.stored == _NONE, self.padded_bytes, self.stored)


def read_indexes(
    records: Sequence[WriterRecord],
    files: Sequence[bytes],
    *,
    read: Callable[[WriterRecord, bytes], PackIndex],
) -> ChunkColumns:
    """Parse and check the bytes of the indexes of several writers.

    ``read`` does so with one. If one has a fault, it is called for all of them, in order, and
    raises the error.
    """
    try:
        columns = columns_of(
            [unseal(data, _BareIndex, origin="", formats=READ_FORMATS) for data in files]
        )
        if _are_sound(columns) and all(map(is_index_of, columns.indexes, records)):
            return columns
    except (CorruptError, ValueError, OverflowError):
        pass
    return columns_of([*map(read, records, files)])


def columns_of(indexes: Sequence[PackIndex]) -> ChunkColumns:
    """Return the chunks of indexes as columns.

    Raises ``ValueError``, ``OverflowError`` or ``CorruptError`` for some indexes that `read_index`
    refuses, and for no others.
    """
    held = [tensor for index in indexes for tensor in index.tensors.values()]
    numbers: defaultdict[_Facts, int] = defaultdict(count().__next__)
    facts = zip(
        chain.from_iterable(index.tensors for index in indexes),
        [tensor.dtype for tensor in held],
        [tensor.shape for tensor in held],
        [tensor.cell for tensor in held],
        [tensor.codec for tensor in held],
        strict=True,
    )
    number = _ints([numbers[each] for each in facts])
    tensors = [HeldTensor(*each) for each in numbers]
    sizes = _ints([len(tensor.chunks) for tensor in held])
    owner = np.arange(len(indexes)).repeat([len(index.tensors) for index in indexes])
    chunks = [chunk for tensor in held for chunk in tensor.chunks]
    tensor = number.repeat(sizes)
    padded = _flags([chunk.padded for chunk in chunks])
    cells = _ints([_bytes_of_cell(each) for each in tensors])[tensor]
    return ChunkColumns(
        indexes=indexes,
        tensors=tensors,
        holders=owner[np.unique(number, return_index=True)[1]].tolist(),
        chunks=chunks,
        index=owner.repeat(sizes),
        tensor=tensor,
        spans=_spans(tensors, [chunk.box for chunk in chunks], tensor),
        at=_ints([chunk.at for chunk in chunks]),
        padded=padded,
        padded_bytes=np.where(padded, cells, _ints([chunk.nbytes for chunk in chunks])),
        stored=_optional([chunk.stored for chunk in chunks]),
        base=_optional([chunk.base for chunk in chunks]),
    )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _flags(values: Sequence[bool]) -> Flags:
    return np.array(values, dtype=bool)


def _optional(values: Sequence[int | None]) -> Ints:
    if values.count(None) == len(values):
        return np.full(len(values), _NONE)
    if min(value for value in values if value is not None) < 0:
        raise ValueError("negative")
    return _ints([_NONE if value is None else value for value in values])


def _bytes_of_cell(held: HeldTensor) -> int:
    """Return the size of a tensor's cell, 0 if it has none."""
    itemsize = dtype_of(held.dtype, origin="").itemsize
    if fault := fault_of_shape(held.shape, held.cell, itemsize=itemsize):
        raise ValueError(fault)
    return 0 if held.cell is None else itemsize * prod(held.cell)


def _spans(tensors: Sequence[HeldTensor], boxes: Sequence[Box], tensor: Ints) -> Spans:
    offsets, shapes = [box.offset for box in boxes], [box.shape for box in boxes]
    dims = _ints([len(each.shape) for each in tensors])
    lo = np.zeros((int(dims.max(initial=0)), len(boxes)), dtype=np.int64)
    extent = np.ones_like(lo)
    for own in {*dims.tolist()}:
        which = np.flatnonzero(dims[tensor] == own)
        for corners, column in ((offsets, lo), (shapes, extent)):
            some = [corners[each] for each in which.tolist()]
            if {*map(len, some)} - {own}:
                raise ValueError("a box of other dims than its tensor")
            flat = np.fromiter(chain.from_iterable(some), np.int64, len(some) * own)
            column[:own, which] = flat.reshape(len(some), own).T
    return Spans(lo, lo + extent)


def _are_sound(columns: ChunkColumns) -> bool:
    """Say whether `read_index` finds nothing: its conditions, each for all indexes or chunks."""
    return (
        not any(next(faults_of_index(index), None) for index in columns.indexes)
        and _are_boxes_of_tensors(columns)
        and _have_checksums(columns)
        and _have_sizes(columns)
        and _are_inside(columns)
        and _fill_their_packs(columns)
    )


def _are_boxes_of_tensors(columns: ChunkColumns) -> bool:
    lo, extent = columns.spans.lo, columns.spans.hi - columns.spans.lo
    shape = _frames(columns, [held.shape for held in columns.tensors])
    cell = _frames(columns, [held.cell or (0,) * len(held.shape) for held in columns.tensors])
    has_cell = _flags([held.cell is not None for held in columns.tensors])[columns.tensor]
    inside = (lo >= 0) & (extent >= 1) & (extent <= shape) & (lo <= shape - extent)
    fits = has_cell & (extent <= cell).all(axis=0)
    return bool(inside.all() and (fits | ~columns.padded).all())


def _frames(columns: ChunkColumns, shapes: Sequence[tuple[int, ...]]) -> Ints:
    """Return the shapes of the chunks' tensors, or of their cells, in the dims of their spans."""
    dims = len(columns.spans.lo)
    full = [(*shape, *(1,) * (dims - len(shape))) for shape in shapes]
    rows = np.array(full, dtype=np.int64).reshape(len(full), dims)
    return rows.T[:, columns.tensor]


def _have_checksums(columns: ChunkColumns) -> bool:
    narrow = [chunk.crc32c for chunk in columns.chunks]
    wide = [chunk.crc64 or 0 for chunk in columns.chunks]
    return all(
        min(sums, default=0) >= 0 and max(sums, default=0) < 1 << bits
        for sums, bits in ((narrow, 32), (wide, 64))
    )


def _have_sizes(columns: ChunkColumns) -> bool:
    """Say whether the sizes follow from the boxes, that after a codec within its ratio."""
    tensors, tensor, before = columns.tensors, columns.tensor, columns.padded_bytes
    itemsize = _ints([dtype_of(held.dtype, origin="").itemsize for held in tensors])[tensor]
    nbytes = _ints([chunk.nbytes for chunk in columns.chunks])
    blocks = _ints([len(chunk.blocks) for chunk in columns.chunks])
    has_codec = _flags([held.codec is not None for held in tensors])[tensor]
    of_box = nbytes == (columns.spans.hi - columns.spans.lo).prod(axis=0) * itemsize
    of_blocks = (blocks == 0) | ((blocks == 4 * -(-nbytes // BLOCK_BYTES)) & ~has_codec)
    of_codec = (before > 0) & (-(-before // MAX_RATIO) <= columns.stored)
    plain = columns.stored == _NONE
    return bool((of_box & of_blocks & np.where(has_codec, ~plain & of_codec, plain)).all())


def _are_inside(columns: ChunkColumns) -> bool:
    """Say whether each chunk ends inside of its pack."""
    indexes = columns.indexes
    limit = _ints([index.pack_bytes for index in indexes])[columns.index]
    for each in np.flatnonzero(~columns.own).tolist():
        bases, base = indexes[columns.index[each]].bases, columns.base[each]
        if base >= len(bases):
            return False
        limit[each] = bases[base].nbytes
    at = columns.at
    ends = columns.stored_bytes <= limit - at - CRC_BYTES
    return bool(((at >= 0) & (at <= limit) & ends).all())


def _fill_their_packs(columns: ChunkColumns) -> bool:
    """Say whether the chunks fill each whole pack, with gaps shorter than an alignment."""
    ends = np.zeros(len(columns.indexes), dtype=np.int64)
    own = np.flatnonzero(columns.own)
    if own.size:
        own = own[np.lexsort((columns.at[own], columns.index[own]))]
        index, at = columns.index[own], columns.at[own]
        end = at + columns.stored_bytes[own] + CRC_BYTES
        before = np.zeros_like(end)
        before[1:] = np.where(index[1:] == index[:-1], end[:-1], 0)
        if not ((before <= at) & (at < before + ALIGN)).all():
            return False
        last = np.flatnonzero(np.diff(index, append=_NONE))
        ends[index[last]] = end[last]
    packs = _ints([each.pack_bytes for each in columns.indexes])
    return bool(((ends <= packs) & (packs < ends + ALIGN)).all())


learn(globals())
