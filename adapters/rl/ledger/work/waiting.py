"""The samples that no worker works on, in the order in which they are given out. Pure.

To give out a sample takes time that does not grow with the number of those that wait. Heaps have
the groups in their order, if they have fixed ranks. If steps take groups as they arrive, few groups
were begun and wait, and the others follow by number.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

from holdfast.adapters.rl.ledger.group import Group
from holdfast.adapters.rl.ledger.order import block_end, steps_without
from holdfast.adapters.rl.ledger.states import OrdinalState
from holdfast.adapters.rl.ledger.taking import Taking
from holdfast.adapters.rl.ledger.work.by_arrival import ByArrival
from holdfast.adapters.rl.samples.trajectory import SampleId

Remaining: TypeAlias = Callable[[Group, int], float]
"""Returns how many tokens a sample of a group is likely to need."""

_Key: TypeAlias = tuple[int, float, int, int]
"""(rank, remaining tokens with the sign changed, ordinal, sample) of the group's first sample."""

_SLACK: Final = 64
_NONE: Final = -1


class Waiting(ABC):
    """The waiting samples; ``remaining`` gives the lengths to order by, None: by number."""

    def __init__(self, remaining: Remaining | None) -> None:
        self._remaining = remaining
        self._is_known = False

    def reorder(self) -> None:
        """Forget the order by lengths and ranks: they changed for many groups."""
        self._is_known = self._is_known and self._remaining is None

    @abstractmethod
    def touch(self, group: Group) -> None:
        """Record that a group was added or changed."""

    @abstractmethod
    def forget(self, ordinal: int) -> None:
        """Forget a group that is not open any more."""

    @abstractmethod
    def candidates(
        self, groups: Mapping[int, Group], *, version: int | None, only_awaited: bool
    ) -> Iterator[SampleId]:
        """Yield the samples that may be given out; each is claimed before the next one is asked.

        ``groups`` are the open ones. ``version`` is the one that the worker is bound to, None: any.
        ``only_awaited``: only those that the next step waits for.
        """

    def _length(self, group: Group, sample: int) -> float:
        """Return the part of a sample's key that has the longest come first."""
        return 0.0 if self._remaining is None else -self._remaining(group, sample)

    @staticmethod
    def _samples(group: Group) -> list[int]:
        """Return the samples of a group that may be given out, by number."""
        if group.state not in (OrdinalState.PENDING, OrdinalState.RUNNING):
            return []
        return [*group.missing]


class WaitingByRank(Waiting):
    """Waiting samples of groups that are taken in the order of their ordinals.

    ``pinned``: a worker gets samples of one version only, so each version has a heap of its own.
    A heap may hold keys that a group had before; only the present one counts.
    """

    def __init__(self, taking: Taking, remaining: Remaining | None, *, pinned: bool) -> None:
        super().__init__(remaining)
        self._taking, self._pinned = taking, pinned
        self._keys: dict[int, _Key] = {}
        self._heaps: dict[int, list[_Key]] = {}
        self._size = 0

    def touch(self, group: Group) -> None:
        """See `Waiting.touch`."""
        if not self._is_known:
            return
        key, ordinal = self._key(group), group.ordinal
        if key is None:
            self._keys.pop(ordinal, None)
        elif key != self._keys.get(ordinal):
            self._keys[ordinal] = key
            heapq.heappush(self._heaps.setdefault(self._version(ordinal), []), key)
            self._size += 1
            if self._size > 2 * len(self._keys) + _SLACK:
                self._build()

    def forget(self, ordinal: int) -> None:
        """See `Waiting.forget`."""
        self._keys.pop(ordinal, None)

    def candidates(
        self, groups: Mapping[int, Group], *, version: int | None, only_awaited: bool
    ) -> Iterator[SampleId]:
        """See `Waiting.candidates`."""
        chosen = version if self._pinned else 0
        if not self._is_known:
            keys = {ordinal: self._key(group) for ordinal, group in groups.items()}
            self._keys = {ordinal: key for ordinal, key in keys.items() if key}
            self._build()
            self._is_known = True
        while True:
            if chosen is None:
                chosen = self._first_version()
            key = None if chosen is None else self._top(chosen)
            if key is None or (only_awaited and not self._taking.awaits(key[2])):
                return
            yield key[2], key[3]

    def _first_version(self) -> int | None:
        """Return the version of the first sample of all."""
        tops = ((self._top(version), version) for version in list(self._heaps))
        return min(((key, version) for key, version in tops if key), default=(None, None))[1]

    def _top(self, version: int) -> _Key | None:
        """Return the first key of a version; let go of those before it that do not count."""
        heap = self._heaps.get(version, [])
        while heap and self._keys.get(heap[0][2]) != heap[0]:
            heapq.heappop(heap)
            self._size -= 1
        if heap:
            return heap[0]
        self._heaps.pop(version, None)
        return None

    def _build(self) -> None:
        """Build the heaps of the present keys."""
        self._heaps, self._size = {}, len(self._keys)
        for ordinal, key in self._keys.items():
            self._heaps.setdefault(self._version(ordinal), []).append(key)
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def _key(self, group: Group) -> _Key | None:
        samples = self._samples(group)
        if not samples:
            return None
        if self._remaining is None:
            return 0, 0.0, group.ordinal, samples[0]
        rank = self._taking.rank(group.ordinal)
        length, sample = min((self._length(group, each), each) for each in samples)
        return rank, length, group.ordinal, sample

    def _version(self, ordinal: int) -> int:
        return self._taking.begin(ordinal, None) if self._pinned else 0


class WaitingByArrival(Waiting):
    """Waiting samples where steps take groups as they arrive.

    Few groups were begun and have waiting samples; they are sorted each time. Of the others, a heap
    has those that the same number of steps can do without, up to the ordinal ``_upto``.
    """

    def __init__(self, taking: ByArrival, remaining: Remaining | None) -> None:
        super().__init__(remaining)
        self._taking = taking
        self._begun: set[int] = set()
        self._heap: list[tuple[float, int]] = []
        self._upto = _NONE

    def touch(self, group: Group) -> None:
        """See `Waiting.touch`; `ByArrival` knows the groups that no worker has begun."""
        if not self._is_known:
            return
        if self._samples(group) and self._taking.is_begun(group.ordinal):
            self._begun.add(group.ordinal)
        else:
            self._begun.discard(group.ordinal)

    def forget(self, ordinal: int) -> None:
        """See `Waiting.forget`."""
        self._begun.discard(ordinal)

    def candidates(
        self, groups: Mapping[int, Group], *, version: int | None, only_awaited: bool
    ) -> Iterator[SampleId]:
        """See `Waiting.candidates`."""
        if not self._is_known:
            self._is_known, self._heap, self._upto = True, [], _NONE
            for group in groups.values():
                self.touch(group)
        lacking = self._taking.lacking()
        begun = sorted(
            key for ordinal in self._begun for key in self._keys(groups[ordinal], lacking)
        )
        for key in heapq.merge(begun, self._fresh_keys(groups, lacking)):
            if only_awaited and key[0]:
                return
            yield key[2], key[3]

    def _keys(self, group: Group, lacking: int) -> Iterator[_Key]:
        """Yield the keys of a group that was begun; their ranks count from the next step."""
        steps = self._steps(self._taking.place(group.ordinal), lacking)
        for sample in self._samples(group):
            yield steps, self._length(group, sample), group.ordinal, sample

    def _fresh_keys(self, groups: Mapping[int, Group], lacking: int) -> Iterator[_Key]:
        """Yield the keys of groups that no worker has begun, which the caller does one by one."""
        place = self._taking.begun
        while fresh := self._taking.fresh:
            end = block_end(place, lacking=lacking, groups=self._taking.groups)
            self._reach(groups, fresh[min(end - place, len(fresh)) - 1])
            steps = self._steps(place, lacking)
            while (top := self._top()) is not None:
                length, ordinal = top
                for sample in self._samples(groups[ordinal]):
                    yield steps, length, ordinal, sample
                place += 1

    def _reach(self, groups: Mapping[int, Group], upto: int) -> None:
        """Have the heap hold the groups up to an ordinal."""
        fresh = self._taking.fresh
        if upto < self._upto:
            self._heap, self._upto = [], _NONE
        for ordinal in fresh[bisect_right(fresh, self._upto) : bisect_right(fresh, upto)]:
            heapq.heappush(self._heap, (self._length(groups[ordinal], 0), ordinal))
        self._upto = upto

    def _top(self) -> tuple[float, int] | None:
        """Return the first of the heap; let go of those before it that were begun."""
        while self._heap and not self._taking.is_fresh(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def _steps(self, place: int, lacking: int) -> int:
        return steps_without(place, lacking=lacking, groups=self._taking.groups)
