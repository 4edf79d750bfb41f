"""Series of any length in bounded room: the wider the range, the wider the buckets. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec

MOST_BUCKETS: Final = 480
"""The buckets of a series at most."""


class ValueBucket(msgspec.Struct, kw_only=True, gc=False):
    """The values that fell into one bucket; ``count`` is exact."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    def merge(self, other: ValueBucket) -> None:
        """Take over the values of another bucket."""
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    @property
    def mean(self) -> float:
        """The mean of the values; 0 without any."""
        return self.total / self.count if self.count else 0.0


class Series:
    """Values over a place (a time in seconds, a step), the same whatever their order.

    Buckets begin at multiples of their width, a power of two times ``finest``. Their width grows
    so that the range of all places needs at most ``most`` of them.
    """

    __slots__ = ("_buckets", "_first", "_last", "_most", "width")

    def __init__(self, *, finest: float = 1.0, most: int = MOST_BUCKETS) -> None:
        if most < 2:
            raise ValueError(f"most is {most}; a series needs 2 buckets or more")
        self.width, self._most = finest, most
        self._buckets: dict[int, ValueBucket] = {}
        self._first, self._last = 0, -1

    def add(self, place: float, value: float) -> None:
        """Add a finite value; values and places that are not finite are left out."""
        if not (math.isfinite(place) and math.isfinite(value)):
            return
        at = math.floor(place / self.width)
        found = self._buckets.get(at)
        if found is None:
            at = self._make_room(place, at)
            found = self._buckets.setdefault(at, ValueBucket())
        found.add(value)

    def _make_room(self, place: float, at: int) -> int:
        """Return the bucket's number after the buckets are wide enough for its place, too."""
        if not self._buckets:
            self._first = self._last = at
            return at
        self._first, self._last = min(self._first, at), max(self._last, at)
        while self._last - self._first >= self._most:
            self._widen()
            at = math.floor(place / self.width)
        return at

    def _widen(self) -> None:
        self.width *= 2
        merged: dict[int, ValueBucket] = {}
        for at, bucket in self._buckets.items():
            if (found := merged.get(at // 2)) is None:
                merged[at // 2] = bucket
            else:
                found.merge(bucket)
        self._buckets = merged
        self._first, self._last = self._first // 2, self._last // 2

    def __len__(self) -> int:
        """Return the number of buckets that hold a value."""
        return len(self._buckets)

    def items(self) -> Iterator[tuple[float, ValueBucket]]:
        """Yield the place at which each bucket begins, and the bucket, by place."""
        for at in sorted(self._buckets):
            yield at * self.width, self._buckets[at]

    def newest(self) -> ValueBucket | None:
        """Return the last bucket, None without any."""
        return self._buckets[max(self._buckets)] if self._buckets else None
