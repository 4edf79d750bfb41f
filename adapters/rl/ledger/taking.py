"""Keeps account of which groups are open, and says which ones steps take. Pure.

There is one way for each `GroupOrder`; the rules of taking what arrives are in `order`.
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
    """Open groups, and those of them that are complete; ``step`` is the next step to train.

    ``groups`` are taken by each step, ``eta`` is the largest staleness in steps.
    """

    def __init__(self, *, groups: int, eta: int) -> None:
        self.groups, self.eta = groups, eta
        self.step = 0
        self._oldest: dict[int, int | None] = {}
        self._complete: list[int] = []

    @classmethod
    def by(cls, order: GroupOrder, *, groups: int, eta: int) -> Taking:
        """Return that of an order."""
        kind = ByArrival if order == GroupOrder.ARRIVAL else ByPrompt
        return kind(groups=groups, eta=eta)

    def admit(self, ordinal: int) -> None:
        """Let a group in."""
        self._oldest[ordinal] = None

    def complete(self, ordinal: int) -> None:
        """Note that a group is complete, or dropped."""
        self._complete.append(ordinal)

    def train(self, ordinals: Collection[int]) -> None:
        """Let go of the groups of a step, which is trained."""
        for ordinal in ordinals:
            del self._oldest[ordinal]
            self._complete.remove(ordinal)
        self.step += 1

    @abstractmethod
    def ordinals(self) -> Sequence[int] | None:
        """Return what the next step takes, ascending; None while something is missing.

        Once returned it is settled.
        """

    @abstractmethod
    def urgency(self) -> dict[int, int]:
        """Return how many steps can do without each group that is not complete."""

    @abstractmethod
    def begin(self, ordinal: int, version: int | None) -> int:
        """Return the oldest version that may sample a group, a sample of which is given out.

        ``version`` is that of the worker's weights, None where it has none.
        """

    @abstractmethod
    def has_room(self, ordinal: int, oldest: int | None) -> bool:
        """Whether a group with tokens by version ``oldest`` can still be trained in time.

        When it can, room is kept for it. None: it has no tokens yet.
        """

    @abstractmethod
    def released(self, protected: int) -> int:
        """Return the ordinal below which all were trained by the first ``protected`` steps.

        What is asked for must not decrease.
        """

    def check(self, admitted: int) -> list[str]:
        """Return what is wrong after ``admitted`` groups were let in."""
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
    """Steps take the groups as they are numbered."""

    def ordinals(self) -> Sequence[int] | None:
        """See `Taking.ordinals`."""
        wanted = range(self.step * self.groups, (self.step + 1) * self.groups)
        return wanted if set(wanted) <= set(self._complete) else None

    def urgency(self) -> dict[int, int]:
        """See `Taking.urgency`."""
        missing = self._oldest.keys() - set(self._complete)
        return {ordinal: ordinal // self.groups - self.step for ordinal in missing}

    def begin(self, ordinal: int, version: int | None) -> int:
        """See `Taking.begin`: what its step allows."""
        return max(0, ordinal // self.groups - self.eta)

    def has_room(self, ordinal: int, oldest: int | None) -> bool:
        """See `Taking.has_room`: its place is its own."""
        return True

    def released(self, protected: int) -> int:
        """See `Taking.released`."""
        return protected * self.groups

    def check(self, admitted: int) -> list[str]:
        """See `Taking.check`."""
        first = self.step * self.groups
        if sorted(self._oldest) == list(range(first, admitted)):
            return []
        return [f"open ordinals are not exactly {first} to {admitted - 1}"]


class ByArrival(Taking):
    """Steps take what is complete, and wait for what would become too old."""

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
        """See `Taking.begin`: the worker's own where there is room, so that it need not wait.

        One that has no weights yet gets the newest but one, which is there already.
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
        """Return the lowest open ordinal; where there is none, all that were let in are trained."""
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
