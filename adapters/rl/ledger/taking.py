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
    def by(cls, order: GroupOrder, *, groups: int, eta: int) -> Taking:
        """Create the instance for an order."""
        kind = ByArrival if order == GroupOrder.ARRIVAL else ByPrompt
        return kind(groups=groups, eta=eta)

    def admit(self, ordinal: int) -> None:
        """Admit a group."""
        self._oldest[ordinal] = None

    def complete(self, ordinal: int) -> None:
        """Record that a group is complete, or dropped."""
        self._complete.append(ordinal)

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
        known = sorted(step for step in self._lowest if step <= protected)
        for step in known[:-1]:
            del self._lowest[step]
        return self._lowest[known[-1]] if known else 0

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
