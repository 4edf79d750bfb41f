"""Cuts of tensors by a mesh, for all ranks at once: cut points per dim, not boxes per rank. Pure.

Placements cut each dim on its own, so the shards of a tensor are the products of intervals, one per
dim: its *cells*. A cell belongs to the ranks whose coordinates hold those intervals, and where axes
replicate, to several ranks. 16,384 ranks are a few thousand intervals, kept as arrays. Ranks are
numbered in C order of their mesh coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Final

import numpy as np

from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.layout import Box, Layout, Split, TensorSpec, is_nested
from holdfast.ckpt.geometry.spans import Ints, expand

_CACHED: Final = 64
"""The number of cut dims that are cached: a model has few extents. 0.5 MB each at 16,384 ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DimCuts:
    """The intervals of one dim of a tensor: ascending, not empty, disjoint, together all of it.

    ``holder`` is the number of an interval's holder: the sum of coordinate × stride over the axes
    that cut this dim. So a rank's number is the sum of its holders and a term for the other axes.
    ``axes`` are the axes that cut this dim. Arrays are int64 of one entry per interval.
    """

    start: Ints
    stop: Ints
    holder: Ints
    axes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.start)

    def of(self, holder: int) -> Ints:
        """Return the intervals of one holder; none for a rank that an uneven cut leaves empty."""
        return np.flatnonzero(self.holder == holder)


@lru_cache(maxsize=_CACHED)
def cuts(
    extent: int, *, mesh: tuple[int, ...], axes: tuple[Split | None, ...], dim: int, nested: bool
) -> DimCuts:
    """Return the cuts of dim ``dim`` of ``extent`` by ``axes`` of ``mesh``; see `shard_runs`."""
    knife = _knife(mesh, axes, dim)
    if (
        nested
        or not extent
        or knife.one_piece
        or (knife.nested and extent % prod(knife.sizes) == 0)
    ):
        start, stop, holder = _runs(extent, knife)
    else:
        who, start, stop = _runs_in_blocks(extent, knife.sizes, knife.splits)
        order = np.argsort(start, kind="stable")
        start, stop, holder = start[order], stop[order], knife.by_number[who[order]]
    for array in (start, stop, holder):
        array.flags.writeable = False
    return DimCuts(start=start, stop=stop, holder=holder, axes=knife.axes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Knife:
    """The axes that cut one dim, whatever its extent; ``at`` and ``holder`` in the dim's order.

    ``at`` are the coordinates, one array per axis in the order of the cuts: plain axes from left to
    right, then strided ones from right to left. ``by_number`` are the holders in C order of their
    coordinates.
    """

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    splits: tuple[Split, ...]
    one_piece: bool
    nested: bool
    at: tuple[tuple[int, Ints], ...]
    holder: Ints
    by_number: Ints


@lru_cache(maxsize=_CACHED)
def _knife(mesh: tuple[int, ...], axes: tuple[Split | None, ...], dim: int) -> _Knife:
    mine = tuple(a for a, split in enumerate(axes) if split is not None and split.dim == dim)
    splits = tuple(Split(dim=0, after=s.after) for a in mine if (s := axes[a]) is not None)
    sizes = tuple(mesh[a] for a in mine)
    order = [i for i, split in enumerate(splits) if split.after == 1]
    order += [i for i in reversed(range(len(splits))) if splits[i].after > 1]
    at = np.indices([sizes[i] for i in order]).reshape(len(order), prod(sizes))
    ranks = np.zeros(prod(sizes), dtype=np.int64)
    numbers = np.zeros(prod(sizes), dtype=np.int64)
    for i, coordinate in zip(order, at, strict=True):
        ranks += coordinate * prod(mesh[mine[i] + 1 :])
        numbers += coordinate * prod(sizes[i + 1 :])
    by_number = np.empty_like(ranks)
    by_number[numbers] = ranks
    return _Knife(
        axes=mine,
        sizes=sizes,
        splits=splits,
        one_piece=all(split.after == 1 for split in splits),
        nested=is_nested(mesh=sizes, axes=splits),
        at=tuple((sizes[i], coordinate) for i, coordinate in zip(order, at, strict=True)),
        holder=ranks,
        by_number=by_number,
    )


def _runs(extent: int, knife: _Knife) -> tuple[Ints, Ints, Ints]:
    """Cut the remainder of each cut as ``torch.chunk`` does, for all coordinates at once.

    Returns start, stop and holder of each run that is not empty.
    """
    start, length = np.zeros(len(knife.holder), dtype=np.int64), np.array([extent])
    for size, coordinate in knife.at:
        full = -(-length // size)
        skipped = np.minimum(full * coordinate, length)
        start += skipped
        length = np.minimum(full, length - skipped)
    if length.all():
        return start, start + length, knife.holder
    full = np.flatnonzero(np.broadcast_to(length, start.shape))
    return start[full], (start + length)[full], knife.holder[full]


def _runs_in_blocks(
    extent: int, sizes: Sequence[int], splits: Sequence[Split]
) -> tuple[Ints, Ints, Ints]:
    """Cut from left to right; a strided axis cuts every block, so a holder has several runs.

    Returns the holder of each run (the number of its coordinate, in C order), its start and its
    stop.
    """
    who, start, length = (np.array([value]) for value in (0, 0, extent))
    holders = 1
    for size, split in zip(sizes, splits, strict=True):
        at = np.cumsum(length) - length  # all holders' local tensors, end to end
        lengths = np.bincount(who, weights=length, minlength=holders).astype(np.int64)
        low, high = _pieces(lengths, blocks=split.after, parts=size)
        first = np.searchsorted(at + length, low, side="right")
        last = np.searchsorted(at, high, side="left")
        piece, run = expand(first, np.where(high > low, last - first, 0))
        lo, hi = np.maximum(low[piece], at[run]), np.minimum(high[piece], (at + length)[run])
        holders *= size
        part = piece // (split.after * size) * size + piece % size
        order = np.argsort(part, kind="stable")
        who, length = part[order], (hi - lo)[order]
        start = (start[run] + lo - at[run])[order]
    return _joined(who, start, start + length)


def _pieces(lengths: Ints, *, blocks: int, parts: int) -> tuple[Ints, Ints]:
    """Return the begin and the end of each part of each block of each local tensor."""
    base = (np.cumsum(lengths) - lengths).reshape(-1, 1, 1)
    whole = lengths.reshape(-1, 1, 1)
    block = -(-whole // blocks)
    block_lo = np.minimum(block * np.arange(blocks).reshape(1, -1, 1), whole)
    block = np.minimum(block, whole - block_lo)
    part = -(-block // parts)
    lo = np.minimum(part * np.arange(parts), block)
    hi = lo + np.minimum(part, block - lo)
    return (base + block_lo + lo).reshape(-1), (base + block_lo + hi).reshape(-1)


def _joined(who: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Join adjacent runs of one holder."""
    follows = (who[1:] == who[:-1]) & (start[1:] == stop[:-1])
    first, last = np.append(True, ~follows), np.append(~follows, True)
    return who[first], start[first], stop[last]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """The cells of one tensor: the products of its dims' intervals, numbered in C order.

    ``replicas``, ascending and int64, are the numbers that the ranks of a cell add to its holders.
    """

    dims: tuple[DimCuts, ...]
    replicas: Ints

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of intervals per dim."""
        return tuple(len(dim) for dim in self.dims)

    @property
    def cells(self) -> int:
        """The number of cells."""
        return prod(self.counts)

    @property
    def strides(self) -> tuple[int, ...]:
        """The difference between the numbers of two cells that are neighbours along each dim."""
        return tuple(prod(self.counts[dim + 1 :]) for dim in range(len(self.dims)))

    def split(self, cell: Ints) -> tuple[Ints, ...]:
        """Return the interval per dim of each cell."""
        return tuple(np.unravel_index(cell, self.counts)) if self.dims else ()

    def holders(self, cell: Ints) -> Ints:
        """Return the first rank that holds each cell; add ``replicas`` for the others."""
        found = np.zeros(len(cell), dtype=np.int64)
        for dim, interval in zip(self.dims, self.split(cell), strict=True):
            found += dim.holder[interval]
        return found

    def replica(self, cell: Ints, *, turn: int) -> Ints | None:
        """Return the number to add to each cell's holders for its writer; None where it is zero.

        Replicas take turns by tensor, which balances them, and by cell, which spreads a tensor.
        """
        if len(self.replicas) == 1:
            return None
        return np.asarray(self.replicas[(cell + turn) % len(self.replicas)])

    def box(self, cell: int) -> Box:
        """Return a cell as a box."""
        where = self.split(np.array([cell]))
        lo = tuple(int(dim.start[i[0]]) for dim, i in zip(self.dims, where, strict=True))
        hi = tuple(int(dim.stop[i[0]]) for dim, i in zip(self.dims, where, strict=True))
        return Box(offset=lo, shape=tuple(b - a for a, b in zip(lo, hi, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor and the effect of each mesh axis on it; ``nested`` as for `shard_runs`."""

    spec: TensorSpec
    axes: tuple[Split | None, ...]
    nested: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return dtype_of(self.spec.dtype, origin=f"tensor {self.spec.fqn}").itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """The placement of every tensor by a mesh and its axes: small, whatever the world size."""

    mesh: tuple[int, ...]
    tensors: Mapping[str, Placed]

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.mesh):
            raise ValueError(f"mesh {self.mesh} has an axis without ranks")
        for fqn, placed in self.tensors.items():
            dims = len(placed.spec.shape)
            if len(placed.axes) != len(self.mesh):
                raise ValueError(f"{fqn}: {len(placed.axes)} placements on mesh {self.mesh}")
            if any(s is not None and not (0 <= s.dim < dims) for s in placed.axes):
                raise ValueError(f"{fqn}: {placed.axes} cut a dim that {dims}-D has not")
            if any(s is not None and s.after < 1 for s in placed.axes):
                raise ValueError(f"{fqn}: {placed.axes} come after less than one shard")

    @property
    def world_size(self) -> int:
        """The number of ranks on the mesh."""
        return prod(self.mesh)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return a rank's coordinate on the mesh.

        Raises ``ValueError`` for a rank that is not on it.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not on mesh {self.mesh} of {self.world_size} ranks")
        return tuple(int(c) for c in np.unravel_index(rank, self.mesh)) if self.mesh else ()

    def partition(self, fqn: str) -> Partition:
        """Return the cells of one tensor."""
        placed, mesh = self.tensors[fqn], self.mesh
        dims = tuple(
            cuts(extent, mesh=mesh, axes=placed.axes, dim=dim, nested=placed.nested)
            for dim, extent in enumerate(placed.spec.shape)
        )
        return Partition(dims=dims, replicas=_replicas(mesh, placed.axes))

    def holders(self, partition: Partition, rank: int) -> tuple[int, ...]:
        """Return the number of a rank as a holder, in each dim of ``partition``."""
        at = self.coordinate(rank)
        return tuple(
            sum(at[axis] * prod(self.mesh[axis + 1 :]) for axis in dim.axes)
            for dim in partition.dims
        )

    def writers(self, fqn: str, *, turn: int) -> Ints:
        """Return the one rank that writes each cell of a tensor; see `turns`."""
        partition = self.partition(fqn)
        cell = np.arange(partition.cells)
        added = partition.replica(cell, turn=turn)
        holders = partition.holders(cell)
        return holders if added is None else holders + added

    def boxes(self, fqn: str, rank: int) -> tuple[Box, ...]:
        """Return the boxes of one tensor that a rank holds."""
        partition = self.partition(fqn)
        dims = []
        for dim, holder in zip(partition.dims, self.holders(partition, rank), strict=True):
            found = dim.of(holder)
            spans = zip(dim.start[found].tolist(), dim.stop[found].tolist(), strict=True)
            dims.append([(start, stop - start) for start, stop in spans])
        return tuple(
            Box(offset=tuple(o for o, _ in spans), shape=tuple(n for _, n in spans))
            for spans in product(*dims)
        )

    def layout(self) -> Layout:
        """Return the boxes of every rank, one by one: for small worlds."""
        ranks = range(self.world_size)
        return Layout(
            specs={fqn: placed.spec for fqn, placed in self.tensors.items()},
            boxes={fqn: tuple(self.boxes(fqn, rank) for rank in ranks) for fqn in self.tensors},
        )

    def turns(self) -> dict[str, int]:
        """Return per tensor which of a cell's replicas writes it; the ranks need not communicate.

        Tensors that the same axes replicate take turns, the largest cells first. So the bytes that
        two replicas write differ by at most a rank's share of one tensor, where all sizes divide.
        If they do not, the bound holds for each kind of tensor (shape, item size, placements).
        """
        places: dict[tuple[int, ...], int] = {}
        found: dict[str, int] = {}
        for _, fqn in sorted(self._sizes()):
            axes = self.tensors[fqn].axes
            alike = tuple(a for a, split in enumerate(axes) if split is None)
            found[fqn] = places[alike] = places.get(alike, -1) + 1
        return found

    def _sizes(self) -> Iterator[tuple[tuple[object, ...], str]]:
        """Yield the sort key of each tensor: cell size first, then what distinguishes kinds."""
        for fqn, placed in self.tensors.items():
            cell = list(placed.spec.shape)
            for size, split in zip(self.mesh, placed.axes, strict=True):
                if split is not None:
                    cell[split.dim] = -(-cell[split.dim] // size)
            itemsize = placed.itemsize
            cut = tuple((-1, 0) if s is None else (s.dim, s.after) for s in placed.axes)
            key = (-prod(cell) * itemsize, itemsize, placed.spec.shape, cut, placed.nested)
            yield key, fqn


@lru_cache(maxsize=_CACHED)
def _replicas(mesh: tuple[int, ...], axes: tuple[Split | None, ...]) -> Ints:
    sizes = tuple(n for n, split in zip(mesh, axes, strict=True) if split is None)
    strides = [prod(mesh[a + 1 :]) for a, split in enumerate(axes) if split is None]
    found = np.zeros(1, dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        found = (found[:, None] + np.arange(size) * stride).reshape(-1)
    found.flags.writeable = False
    return found


def cut_like(placed: Placed) -> tuple[object, ...]:
    """Return a key that is equal for two tensors of one layout if their partitions are the same."""
    return placed.spec.shape, placed.axes, placed.nested
