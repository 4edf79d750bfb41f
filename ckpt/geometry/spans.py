"""Many boxes of one tensor as arrays, to test all of them at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

_LIMIT: Final = 1 << 62
"""No extent, end or count may reach this: below it sums of two stay within int64."""

_PAIRS: Final = 1 << 18
"""The number of pairs of boxes that are compared together."""


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Boxes as their corners: ``lo`` and ``hi`` have shape (dims, boxes), ``hi`` excluded."""

    lo: Ints
    hi: Ints

    def __len__(self) -> int:
        return int(self.lo.shape[1])

    def take(self, which: NDArray[np.bool_] | Ints) -> Spans:
        """Return some of the boxes."""
        return Spans(self.lo[:, which], self.hi[:, which])

    @property
    def full(self) -> NDArray[np.bool_]:
        """A mask of the boxes that are not empty."""
        return np.asarray((self.hi > self.lo).all(axis=0))

    @property
    def busiest_dim(self) -> int:
        """The dim with the most different starts; 0-D boxes have none."""
        return max(range(len(self.lo)), key=lambda dim: len(np.unique(self.lo[dim])))


def spans_of(
    offsets: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int, ...]], *, dims: int
) -> Spans | None:
    """Return the boxes as arrays; None if a number is too large or a box has other dims."""
    count = len(offsets)
    if {*map(len, offsets), *map(len, shapes)} - {dims}:
        return None
    try:
        lo = np.fromiter(chain.from_iterable(offsets), np.int64)
        extent = np.fromiter(chain.from_iterable(shapes), np.int64)
    except OverflowError:
        return None
    if lo.size and max(lo.max(), extent.max()) >= _LIMIT:
        return None
    lo = np.ascontiguousarray(lo.reshape(count, dims).T)
    return Spans(lo, lo + extent.reshape(count, dims).T)


def covers(shape: Sequence[int], spans: Spans) -> bool:
    """Say whether the boxes hold every element of ``shape`` exactly once; linear for grids.

    Empty boxes do not count. False as well for shapes of more elements than an int64 counts.
    """
    if not (full := spans.full).all():
        spans = spans.take(full)
    total = prod(shape)
    if max(total * max(len(spans), 1), *shape, 0) >= _LIMIT:
        return False
    limits = np.array(shape, dtype=np.int64).reshape(-1, 1)
    if (spans.lo < 0).any() or (spans.hi > limits).any():
        return False
    if int((spans.hi - spans.lo).prod(axis=0).sum()) != total:
        return False
    return _are_cells(spans) or not overlap(spans)


def _are_cells(spans: Spans) -> bool:
    """Say whether the boxes are different cells of a product of cuts, so none can overlap.

    Then along each dim any two intervals are equal or disjoint, and two boxes differ in one.
    """
    count = len(spans)
    number, cells = np.zeros(count, dtype=np.int64), 1
    for lo, hi in zip(spans.lo, spans.hi, strict=True):
        order = np.argsort(lo, kind="stable")
        start, stop = lo[order], hi[order]
        fresh = start[1:] >= stop[:-1]
        if not (fresh | ((start[1:] == start[:-1]) & (stop[1:] == stop[:-1]))).all():
            return False
        place = np.zeros(count, dtype=np.int64)
        np.cumsum(fresh, out=place[1:])
        intervals = int(place[-1]) + 1 if count else 1
        cells *= intervals
        if cells >= _LIMIT:
            return False
        number *= intervals
        number[order] += place
    number.sort()
    return bool((number[1:] != number[:-1]).all())


def overlap(spans: Spans) -> bool:
    """Say whether two of the boxes, none of them empty, share an element.

    A sweep along the dim with the most starts tests only pairs that meet there, many at once.
    """
    if not len(spans.lo):
        return len(spans) > 1
    sweep = spans.busiest_dim
    spans = spans.take(np.argsort(spans.lo[sweep], kind="stable"))
    after = np.arange(1, len(spans) + 1)
    meets = np.searchsorted(spans.lo[sweep], spans.hi[sweep], side="left") - after
    pairs_before = np.concatenate(([0], np.cumsum(meets)))
    begin = 0
    while begin < len(spans):
        room = pairs_before[begin] + _PAIRS
        end = max(int(np.searchsorted(pairs_before, room, side="right")) - 1, begin + 1)
        ones, others = expand(after[begin:end], meets[begin:end])
        a, b = spans.take(ones + begin), spans.take(others)
        if ((a.lo < b.hi) & (b.lo < a.hi)).all(axis=0).any():
            return True
        begin = end
    return False


def expand(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Return the pairs (i, first[i] + j) for all i and j < count[i], in order, as two arrays."""
    ones = np.arange(len(count)).repeat(count)
    skipped = count.cumsum() - count - first
    return ones, np.arange(len(ones)) - skipped.repeat(count)
