"""The set of open groups, and the choice of those that a step takes. Pure.

Here are the classes for steps that take groups by prompt number; `ByArrival` has a module of its
own. To ask for a step's groups costs little while they are not complete, however many are open.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence

from holdfast.ckpt.types import Json


class Taking(ABC):
    """The open groups and the complete ones among them; ``step`` is the next step to train.

    Each step takes ``groups`` groups; ``eta`` is the largest staleness in steps.
    """

    def __init__(self, *, groups: int, eta: int) -> None:
        self.groups, self.eta = groups, eta
        self.step = 0
        self._oldest: dict[int, int | None] = {}
        self._complete: dict[int, None] = {}  # in order of arrival

    @property
    def taken(self) -> int:
        """Number of groups that the steps so far took, those without samples included."""
        return self.step * self.groups

    def admit(self, ordinal: int, *, now: bool = False) -> None:
        """Admit a group; ``now``: in addition, because the next step is `short` of groups."""
        self._oldest[ordinal] = None

    def complete(self, ordinal: int, *, trains: bool = True) -> None:
        """Record that a group is complete; unless it ``trains``, its step goes without it."""
        self._complete[ordinal] = None

    @property
    def short(self) -> int:
        """Number of further groups that the next step needs beside all open ones."""
        return 0

    def train(self, ordinals: Collection[int]) -> None:
        """Forget the groups of a step that is trained."""
        for ordinal in ordinals:
            del self._oldest[ordinal]
            del self._complete[ordinal]
        self.step += 1

    @abstractmethod
    def ordinals(self) -> Sequence[int] | None:
        """Return the ordinals that the next step takes, ascending; None while some are missing.

        Once returned, the choice is settled.
        """

    @abstractmethod
    def rank(self, ordinal: int) -> int:
        """Return the step that will take an incomplete group, as far as known now."""

    @abstractmethod
    def awaited(self) -> set[int]:
        """Return the incomplete groups that the next step waits for."""

    def awaits(self, ordinal: int) -> bool:
        """Say whether the next step waits for an incomplete group."""
        return self.rank(ordinal) <= self.step

    @abstractmethod
    def begin(self, ordinal: int, version: int | None) -> int:
        """Return the oldest version that may sample a group, a sample of which is given out.

        ``version`` is that of the worker's weights, None if it has none.
        """

    @abstractmethod
    def has_room(self, ordinal: int, oldest: int | None) -> bool:
        """Say whether a group with tokens by version ``oldest`` can still be trained in time.

        If so, room is reserved for it. ``oldest`` None: the group has no tokens yet.
        """

    @abstractmethod
    def released(self, protected: int) -> int:
        """Return the ordinal below which all were trained by the first ``protected`` steps.

        Successive calls must not decrease ``protected``.
        """

    def check(self, admitted: int) -> list[str]:
        """Return the violations of the invariants after ``admitted`` groups were admitted."""
        if len(self._oldest) == admitted - self.step * self.groups:
            return []
        return [
            f"{len(self._oldest)} ordinals are open: {admitted} were admitted, "
            f"{self.step * self.groups} are trained"
        ]

    def state_dict(self) -> dict[str, Json]:
        """Return everything as JSON values."""
        return {
            "step": self.step,
            "open": [[ordinal, oldest] for ordinal, oldest in self._oldest.items()],
            "complete": list(self._complete),
        }

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Replace everything by what ``state_dict`` returned."""
        self.step = state["step"]
        self._oldest = dict(state["open"])
        self._complete = dict.fromkeys(state["complete"])


class ByPrompt(Taking):
    """Steps take the groups by prompt number."""

    def __init__(self, *, groups: int, eta: int) -> None:
        super().__init__(groups=groups, eta=eta)
        self._upto = 0

    def ordinals(self) -> Sequence[int] | None:
        """See `Taking.ordinals`."""
        first = self.step * self.groups
        self._upto = max(self._upto, first)
        while self._upto in self._complete:  # seldom more than once for each group
            self._upto += 1
        return range(first, first + self.groups) if self._upto >= first + self.groups else None

    def rank(self, ordinal: int) -> int:
        """See `Taking.rank`."""
        return ordinal // self.groups

    def awaited(self) -> set[int]:
        """See `Taking.awaited`."""
        wanted = range(self.step * self.groups, (self.step + 1) * self.groups)
        return {o for o in wanted if o in self._oldest and o not in self._complete}

    def begin(self, ordinal: int, version: int | None) -> int:
        """See `Taking.begin`: the oldest version that the group's step allows."""
        return max(0, ordinal // self.groups - self.eta)

    def has_room(self, ordinal: int, oldest: int | None) -> bool:
        """See `Taking.has_room`: always true, because every group has its own step."""
        return True

    def released(self, protected: int) -> int:
        """See `Taking.released`."""
        return protected * self.groups

    def check(self, admitted: int) -> list[str]:
        """See `Taking.check`."""
        first = self.step * self.groups
        if sorted(self._oldest) == list(range(first, admitted)):
            return []
        return [f"the open ordinals are not exactly {first} to {admitted - 1}"]

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """See `Taking.load_state_dict`."""
        super().load_state_dict(state)
        self._upto = 0


class ByReward(Taking):
    """Steps take groups by prompt number, and in addition all that are skipped among them.

    A step takes the groups up to the first ``groups`` that are not skipped. A group's versions
    follow from its place when it is admitted: it is trained ``place // groups`` steps later at the
    latest, since groups that are skipped only bring it forward. If too few are left, all open ones
    are known to be needed, and the `short` rest is admitted for the step itself. So all of it is a
    function of the rewards, whatever the order in which samples arrive.
    """

    def __init__(self, *, groups: int, eta: int) -> None:
        super().__init__(groups=groups, eta=eta)
        self._first = 0
        self._skipped: list[int] = []  # ascending
        self._taken_by = {0: 0}
        self._upto = self._filled = 0

    @property
    def taken(self) -> int:
        """See `Taking.taken`: the ordinal of the first open group."""
        return self._first

    @property
    def short(self) -> int:
        """See `Taking.short`."""
        return max(0, self.groups - len(self._oldest) + len(self._skipped))

    def _place(self, ordinal: int) -> int:
        """Return the number of groups before one that are not skipped."""
        return ordinal - self._first - bisect_left(self._skipped, ordinal)

    def admit(self, ordinal: int, *, now: bool = False) -> None:
        """See `Taking.admit`."""
        later = 0 if now else (ordinal - self._first) // self.groups
        self._oldest[ordinal] = max(0, self.step + later - self.eta)

    def complete(self, ordinal: int, *, trains: bool = True) -> None:
        """See `Taking.complete`: further groups are taken for those that do not train."""
        super().complete(ordinal)
        if not trains:
            insort(self._skipped, ordinal)

    def train(self, ordinals: Collection[int]) -> None:
        """See `Taking.train`."""
        super().train(ordinals)
        self._first += len(ordinals)
        self._skipped = self._skipped[bisect_left(self._skipped, self._first) :]
        self._taken_by[self.step] = self._first
        self._upto, self._filled = self._first, 0

    def ordinals(self) -> Sequence[int] | None:
        """See `Taking.ordinals`."""
        while self._filled < self.groups and self._upto in self._complete:
            self._upto += 1
            self._filled = self._place(self._upto)
        return range(self._first, self._upto) if self._filled == self.groups else None

    def rank(self, ordinal: int) -> int:
        """See `Taking.rank`: groups that are skipped may bring any group forward."""
        return self.step + self._place(ordinal) // self.groups

    def awaited(self) -> set[int]:
        """See `Taking.awaited`."""
        wanted = itertools.takewhile(self.awaits, itertools.count(self._first))
        return {o for o in wanted if o in self._oldest and o not in self._complete}

    def begin(self, ordinal: int, version: int | None) -> int:
        """See `Taking.begin`: as its place was when it was admitted."""
        oldest = self._oldest[ordinal]
        assert oldest is not None
        return oldest

    def has_room(self, ordinal: int, oldest: int | None) -> bool:
        """See `Taking.has_room`: always true, because no group is overtaken."""
        return True

    def released(self, protected: int) -> int:
        """See `Taking.released`."""
        return entry_at(self._taken_by, protected)

    def check(self, admitted: int) -> list[str]:
        """See `Taking.check`."""
        if sorted(self._oldest) != list(range(self._first, admitted)):
            return [f"the open ordinals are not exactly {self._first} to {admitted - 1}"]
        if not self._complete.keys() >= set(self._skipped):
            return [f"ordinals {self._skipped} are skipped, {[*self._complete]} are complete"]
        return []

    def state_dict(self) -> dict[str, Json]:
        """See `Taking.state_dict`."""
        more = {"first": self._first, "skipped": list(self._skipped)}
        return {**super().state_dict(), **more}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """See `Taking.load_state_dict`."""
        super().load_state_dict(state)
        self._first, self._skipped = state["first"], sorted(state["skipped"])
        self._taken_by = {self.step: self._first}
        self._upto, self._filled = self._first, 0


def entry_at(lowest: dict[int, int], protected: int) -> int:
    """Return the entry of the last step up to ``protected``, 0 without one; forget older ones."""
    known = sorted(step for step in lowest if step <= protected)
    for step in known[:-1]:
        del lowest[step]
    return lowest[known[-1]] if known else 0
