"""Boxes of tensors, and the boxes that ranks hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from operator import sub
from types import EllipsisType
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.ckpt.errors import StateError

_SHAPES: Final = 16384
"""The number of shapes whose box is cached: those of a job's shards are few."""


class Box(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A half-open n-D region of a tensor's global index space; 0-D for scalars.

    An empty box (some extent 0) is legal: uneven shards leave ranks without data.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        offset, shape = self.offset, self.shape
        if len(offset) != len(shape):
            raise ValueError(f"box offset {offset} and shape {shape} differ in rank")
        if not shape:  # a million boxes are checked at a commit
            return
        if min(offset) < 0:
            raise ValueError(f"box offset {offset} has a negative extent")
        if min(shape) < 0:
            raise ValueError(f"box shape {shape} has a negative extent")

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[EllipsisType | slice, ...]:
        """The index that selects the box from an array, as a view even in 0-D."""
        return (..., *(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True)))

    def within(self, frame: Box) -> Box:
        """Return the same region relative to ``frame``, which holds it."""
        if self.offset == frame.offset:
            return at_origin(self.shape)
        if not any(frame.offset):
            return self
        return Box(offset=tuple(map(sub, self.offset, frame.offset)), shape=self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, or None if there is none."""
        if self.offset == other.offset and self.shape == other.shape and 0 not in self.shape:
            return self
        offset: list[int] = []
        shape: list[int] = []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            lo = max(a, b)
            extent = min(a + n, b + m) - lo
            if extent <= 0:  # most pairs end here: a plan looks at every chunk of a tensor
                return None
            offset.append(lo)
            shape.append(extent)
        common = tuple(shape)
        if common == self.shape:  # all of it; a box that exists already need not be checked again
            return self
        return other if common == other.shape else Box(offset=tuple(offset), shape=common)


@lru_cache(_SHAPES)
def at_origin(shape: tuple[int, ...]) -> Box:
    """Return the box of ``shape`` that begins where its frame does."""
    return Box(offset=(0,) * len(shape), shape=shape)


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The global description of a tensor: name, dtype (torch's name, ``"bfloat16"``), shape."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A mesh axis that cuts tensor dim ``dim``; ``after`` counts shards cut before it (strided).

    ``after`` is 1 for an ordinary shard. FSDP over tensor parallelism writes ``after=2`` on its
    axis: the axes to its right, with 2 ranks in all, cut that dim first (torch's
    ``_StridedShard``).
    """

    dim: int
    after: int = 1


Axes: TypeAlias = Sequence[Split | None]
"""The effect of each mesh axis on a tensor: cut a dim, or replicate (None)."""

Run: TypeAlias = tuple[int, int]
"""A range of indices along one dim: (start, length)."""


class Region(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A box of a tensor, and its start (per dim) in the local tensor of the rank that holds it."""

    box: Box
    at: tuple[int, ...]


def chunk_range(extent: int, *, parts: int, index: int) -> tuple[int, int]:
    """Return (start, length) of part ``index`` as ``torch.chunk`` cuts; the last may be empty."""
    full = -(-extent // parts)
    start = min(full * index, extent)
    return start, min(full, extent - start)


def shard_runs(
    shape: Sequence[int],
    *,
    mesh: Sequence[int],
    coordinate: Sequence[int],
    axes: Axes,
    nested: bool = False,
) -> tuple[tuple[Run, ...], ...]:
    """Return per dim the indices that the rank at ``coordinate`` holds, in its own order.

    Axes cut from left to right, as ``distribute_tensor`` does. ``nested`` follows FSDP2 over tensor
    parallelism, which differs where the sizes are uneven: it cuts the local tensor, so strided axes
    come last, and each cuts its input in one piece. Both agree where all sizes divide.
    """
    cuts = list(range(len(axes)))
    if nested:
        cuts.sort(key=lambda a: -a if (s := axes[a]) is not None and s.after > 1 else -len(axes))
    runs: list[tuple[Run, ...]] = [((0, extent),) if extent else () for extent in shape]
    for axis in cuts:
        if (split := axes[axis]) is None:
            continue
        extent = sum(length for _, length in runs[split.dim])
        kept: list[Run] = []
        for block in range(1 if nested else split.after):
            start, length = chunk_range(extent, parts=1 if nested else split.after, index=block)
            part = chunk_range(length, parts=mesh[axis], index=coordinate[axis])
            kept += _take(runs[split.dim], (start + part[0], part[1]))
        runs[split.dim] = _joined(kept)
    return tuple(runs)


def is_nested(*, mesh: Sequence[int], axes: Axes) -> bool:
    """Say whether strided axes are as FSDP2 writes them: after all cuts of the dim to their right.

    Only then can a tensor lie in the ``nested`` way of `shard_runs`.
    """
    strided = [a for a, split in enumerate(axes) if split is not None and split.after > 1]
    return bool(strided) and all(
        split is not None
        and split.after
        == prod(mesh[b] for b in range(a + 1, len(axes)) if (s := axes[b]) and s.dim == split.dim)
        for a in strided
        for split in [axes[a]]
    )


def _take(runs: Sequence[Run], span: Run) -> Iterator[Run]:
    """Yield the part ``span`` of the concatenated ``runs``."""
    at = 0
    for start, length in runs:
        lo, hi = max(at, span[0]), min(at + length, span[0] + span[1])
        if hi > lo:
            yield start + lo - at, hi - lo
        at += length


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return ``runs`` with neighbours joined."""
    found: list[Run] = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return tuple(found)


def regions_of(runs: Sequence[Sequence[Run]]) -> tuple[Region, ...]:
    """Return the boxes that the indices of each dim form; none if a dim has no index."""
    placed: list[list[tuple[Run, int]]] = []
    for found in runs:
        starts = accumulate((length for _, length in found), initial=0)
        placed.append(list(zip(found, starts, strict=False)))
    return tuple(
        Region(
            box=Box(offset=tuple(r[0] for r, _ in dims), shape=tuple(r[1] for r, _ in dims)),
            at=tuple(at for _, at in dims),
        )
        for dims in product(*placed)
    )


def flat_boxes(shape: Sequence[int], *, start: int, length: int) -> tuple[Box, ...]:
    """Return the boxes that elements from ``start`` on of the flattened tensor form, in order.

    Each box is contiguous in the flattened tensor too. There are at most ``2 * dims - 1``. Raises
    ``ValueError`` for a range that is not within the tensor.
    """
    if start < 0 or length < 0 or start + length > prod(shape):
        raise ValueError(f"elements {start} to {start + length} are not within {tuple(shape)}")
    found = _flat(tuple(shape), start, start + length)
    return tuple(Box(offset=offset, shape=extent) for offset, extent in found)


_Corners: TypeAlias = Iterator[tuple[tuple[int, ...], tuple[int, ...]]]


def _flat(shape: tuple[int, ...], start: int, end: int) -> _Corners:
    if start == end:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (end - start,) * len(shape)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if last < first:
        yield from _within(shape, last, start, end)
        return
    yield from _within(shape, first - 1, start, first * row)
    if last > first:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _within(shape, last, last * row, end)


def _within(shape: tuple[int, ...], row: int, start: int, end: int) -> _Corners:
    base = row * prod(shape[1:])
    for offset, extent in _flat(shape[1:], start - base, end - base):
        yield (row, *offset), (1, *extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One box of a tensor that a rank holds, and so could write; ``nbytes`` balances the work.

    Boxes of one ``group`` that the same ranks hold are written by one of them.
    """

    spec: TensorSpec
    box: Box
    nbytes: int
    group: str = ""


def choose_writers(
    holdings: Sequence[Iterable[Holding]],
) -> tuple[dict[str, TensorSpec], list[list[Holding]]]:
    """Decide which rank writes which box, so that replicas are written once and bytes balance.

    ``holdings[rank]`` are the boxes of that rank. Every rank that calls this with the same argument
    gets the same answer. Raises ``StateError`` if ranks disagree on the spec of a tensor or
    together hold less or more than all of it.
    """
    specs: dict[str, TensorSpec] = {}
    holders: dict[tuple[str, Box], tuple[Holding, list[int]]] = {}
    for rank, own in enumerate(holdings):
        for holding in own:
            spec = specs.setdefault(holding.spec.fqn, holding.spec)
            if spec != holding.spec:
                raise StateError(
                    f"{spec.fqn}: rank {rank} holds {holding.spec.dtype} {holding.spec.shape}, "
                    f"another rank {spec.dtype} {spec.shape}; wrap per-rank values in PerRank"
                )
            holders.setdefault((spec.fqn, holding.box), (holding, []))[1].append(rank)
    _check_whole(specs, [holding for holding, _ in holders.values()])
    writes: list[list[Holding]] = [[] for _ in holdings]
    load = [0] * len(holdings)
    replicated: dict[tuple[Any, ...], list[Holding]] = {}
    for (fqn, box), (holding, ranks) in holders.items():
        if len(ranks) == 1:
            writes[ranks[0]].append(holding)
            load[ranks[0]] += holding.nbytes
        elif box.size:
            alone = () if holding.group else (fqn, box.offset)
            replicated.setdefault((holding.group, alone, tuple(ranks)), []).append(holding)
    sized = [
        (sum(each.nbytes for each in copies), key, copies) for key, copies in replicated.items()
    ]
    for nbytes, (_, _, ranks), copies in sorted(sized, key=lambda item: (-item[0], item[1])):
        rank = min(ranks, key=lambda r: (load[r], r))
        writes[rank] += copies
        load[rank] += nbytes
    return specs, [[h for h in part if h.box.size] for part in writes]


def _check_whole(specs: Mapping[str, TensorSpec], holdings: Iterable[Holding]) -> None:
    cells = dict.fromkeys(specs, 0)
    for holding in holdings:
        cells[holding.spec.fqn] += holding.box.size
    for fqn, count in cells.items():
        if count != (needed := prod(specs[fqn].shape)):
            raise StateError(
                f"{fqn}: the ranks hold {count} elements of shape {specs[fqn].shape}, which has "
                f"{needed}; shard it over the whole group, or keep it whole on every rank"
            )
