"""The set of open groups, and the choice of those that a step takes. Pure.

There is one class for each `GroupOrder`; the rules of taking by arrival are in `order`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from holdfast.adapters.rl.ledger.order import (
    GroupOrder,
    Open,
    choose,
    fits,
    oldest_version,
    urgency,
)
from holdfast.ckpt.types import Json


class Taking(ABC):
    """The open groups and the complete ones among them; ``step`` is the next step to train.

    Each step takes ``groups`` groups; ``eta`` is the largest staleness in steps.
    """

    def __init__(self, *, groups: int, eta: int) -> None:
        self.groups, self.eta = groups, eta
        self.step = 0
        self._oldest: dict[int, int | None] = {}
        self._complete: list[int] = []

    @classmethod
    def by(cls, order: GroupOrder, *, groups: int, eta: int, skips: bool = False) -> Taking:
        """Create the instance for an order, or for one that ``skips`` groups of equal rewards."""
        if skips:
            return ByReward(groups=groups, eta=eta)
        kind = ByArrival if order == GroupOrder.ARRIVAL else ByPrompt
        return kind(groups=groups, eta=eta)

    @property
    def taken(self) -> int:
        """Number of groups that the steps so far took, those without samples included."""
        return self.step * self.groups

    def admit(self, ordinal: int, *, now: bool = False) -> None:
        """Admit a group; ``now``: in addition, because the next step is `short` of groups."""
        self._oldest[ordinal] = None

    def complete(self, ordinal: int, *, trains: bool = True) -> None:
        """Record that a group is complete; unless it ``trains``, its step goes without it."""
        self._complete.append(ordinal)

    @property
    def short(self) -> int:
        """Number of further groups that the next step needs beside all open ones."""
        return 0

    def train(self, ordinals: Collection[int]) -> None:
        """Forget the groups of a step that is trained."""
        for ordinal in ordinals:
            del self._oldest[ordinal]
            self._complete.remove(ordinal)
        self.step += 1

    @abstractmethod
    def ordinals(self) -> Sequence[int] | None:
        """Return the ordinals that the next step takes, ascending; None while some are missing.

        Once returned, the choice is settled.
        """

    @abstractmethod
    def urgency(self) -> dict[int, int]:
        """Return how many steps can do without each group that is not complete."""

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
        self._complete = list(state["complete"])


class ByPrompt(Taking):
    """Steps take the groups by prompt number."""

    def ordinals(self) -> Sequence[int] | None:
        """See `Taking.ordinals`."""
        wanted = range(self.step * self.groups, (self.step + 1) * self.groups)
        return wanted if set(wanted) <= set(self._complete) else None

    def urgency(self) -> dict[int, int]:
        """See `Taking.urgency`."""
        missing = self._oldest.keys() - set(self._complete)
        return {ordinal: ordinal // self.groups - self.step for ordinal in missing}

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
        self._skipped: set[int] = set()
        self._taken_by = {0: 0}

    @property
    def taken(self) -> int:
        """See `Taking.taken`: the ordinal of the first open group."""
        return self._first

    @property
    def short(self) -> int:
        """See `Taking.short`."""
        return max(0, self.groups - len(self._wanted()))

    def _wanted(self) -> list[int]:
        """Return the open groups that are not skipped, ascending."""
        return sorted(self._oldest.keys() - self._skipped)

    def admit(self, ordinal: int, *, now: bool = False) -> None:
        """See `Taking.admit`."""
        later = 0 if now else (ordinal - self._first) // self.groups
        self._oldest[ordinal] = max(0, self.step + later - self.eta)

    def complete(self, ordinal: int, *, trains: bool = True) -> None:
        """See `Taking.complete`: further groups are taken for those that do not train."""
        super().complete(ordinal)
        if not trains:
            self._skipped.add(ordinal)

    def train(self, ordinals: Collection[int]) -> None:
        """See `Taking.train`."""
        super().train(ordinals)
        self._skipped -= set(ordinals)
        self._first += len(ordinals)
        self._taken_by[self.step] = self._first

    def ordinals(self) -> Sequence[int] | None:
        """See `Taking.ordinals`."""
        wanted = self._wanted()
        if len(wanted) < self.groups:
            return None
        taken = range(self._first, wanted[self.groups - 1] + 1)
        return taken if set(taken) <= set(self._complete) else None

    def urgency(self) -> dict[int, int]:
        """See `Taking.urgency`: groups that are skipped may bring any group forward."""
        done = set(self._complete)
        return {
            ordinal: place // self.groups
            for place, ordinal in enumerate(self._wanted())
            if ordinal not in done
        }

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
        return _at(self._taken_by, protected)

    def check(self, admitted: int) -> list[str]:
        """See `Taking.check`."""
        if sorted(self._oldest) != list(range(self._first, admitted)):
            return [f"the open ordinals are not exactly {self._first} to {admitted - 1}"]
        if not self._skipped <= set(self._complete):
            return [f"ordinals {sorted(self._skipped)} are skipped, {self._complete} are complete"]
        return []

    def state_dict(self) -> dict[str, Json]:
        """See `Taking.state_dict`."""
        more = {"first": self._first, "skipped": sorted(self._skipped)}
        return {**super().state_dict(), **more}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """See `Taking.load_state_dict`."""
        super().load_state_dict(state)
        self._first, self._skipped = state["first"], set(state["skipped"])
        self._taken_by = {self.step: self._first}


class ByArrival(Taking):
    """Steps take complete groups, and wait for groups that would become too old."""

    def __init__(self, *, groups: int, eta: int) -> None:
        super().__init__(groups=groups, eta=eta)
        self._settled: tuple[int, ...] = ()
        self._lowest = {0: 0}

    def train(self, ordinals: Collection[int]) -> None:
        """See `Taking.train`."""
        super().train(ordinals)
        self._settled = ()
        self._lowest[self.step] = self._lowest_open()

    def ordinals(self) -> Sequence[int] | None:
        """See `Taking.ordinals`."""
        if not self._settled:
            self._settled = tuple(choose(self._open(), step=self.step, groups=self.groups) or ())
        return self._settled or None

    def urgency(self) -> dict[int, int]:
        """See `Taking.urgency`."""
        return urgency(self._open(), step=self._next, groups=self.groups)

    def begin(self, ordinal: int, version: int | None) -> int:
        """See `Taking.begin`: the worker's own version where possible, so that it need not wait.

        A worker without weights gets the second-newest version, which already exists.
        """
        oldest = self._oldest[ordinal]
        if oldest is None:
            least = oldest_version(self._due(), step=self._next, groups=self.groups, eta=self.eta)
            own = self.step - 1 if version is None else min(version, self.step)
            oldest = self._oldest[ordinal] = max(least, own)
        return oldest

    def has_room(self, ordinal: int, oldest: int | None) -> bool:
        """See `Taking.has_room`."""
        known = self._oldest[ordinal]
        if oldest is None:
            self.begin(ordinal, None)
            return True
        if known is not None and known <= oldest:
            return True
        due = (*self._due(but=ordinal), oldest + self.eta)
        if ordinal in self._settled or not fits(due, step=self._next, groups=self.groups):
            return False
        self._oldest[ordinal] = oldest
        return True

    def released(self, protected: int) -> int:
        """See `Taking.released`."""
        return _at(self._lowest, protected)

    def check(self, admitted: int) -> list[str]:
        """See `Taking.check`."""
        found = super().check(admitted)
        if not fits(self._due(), step=self._next, groups=self.groups):
            due = sorted(self._due())
            found.append(f"ordinals due by steps {due} cannot all be trained from {self._next} on")
        return found

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """See `Taking.load_state_dict`."""
        super().load_state_dict(state)
        self._settled = ()
        self._lowest = {self.step: self._lowest_open()}

    def _lowest_open(self) -> int:
        """Return the lowest open ordinal; without open ones, the number of trained ordinals."""
        return min(self._oldest, default=self.step * self.groups)

    @property
    def _next(self) -> int:
        """The next step whose groups are not settled."""
        return self.step + bool(self._settled)

    def _open(self) -> list[Open]:
        places = {ordinal: place for place, ordinal in enumerate(self._complete)}
        return [
            Open(
                ordinal=ordinal,
                due=None if oldest is None else oldest + self.eta,
                arrived=places.get(ordinal),
            )
            for ordinal, oldest in self._oldest.items()
            if ordinal not in self._settled
        ]

    def _due(self, *, but: int | None = None) -> list[int]:
        return [each.due for each in self._open() if each.due is not None and each.ordinal != but]


def _at(lowest: dict[int, int], protected: int) -> int:
    """Return the entry of the last step up to ``protected``, 0 without one; forget older ones."""
    known = sorted(step for step in lowest if step <= protected)
    for step in known[:-1]:
        del lowest[step]
    return lowest[known[-1]] if known else 0
