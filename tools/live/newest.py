"""The newest of any number of things, with an exact count of all. Pure."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Newest(Generic[_Item]):
    """Keeps the ``most`` items with the greatest times, whatever the order in which they come."""

    __slots__ = ("_heap", "_most", "count")

    def __init__(self, most: int) -> None:
        self._most, self.count = most, 0
        self._heap: list[tuple[float, int, _Item]] = []

    def add(self, time_s: float, item: _Item) -> None:
        """Add an item; the oldest one goes if there are too many."""
        self.count += 1
        entry = (time_s, self.count, item)
        if len(self._heap) < self._most:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def __len__(self) -> int:
        """Return the number of items that are kept."""
        return len(self._heap)

    def in_order(self) -> list[_Item]:
        """Return the items, oldest first."""
        return [item for _, _, item in sorted(self._heap, key=lambda entry: entry[:2])]
