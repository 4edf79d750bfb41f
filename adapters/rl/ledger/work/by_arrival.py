"""The choice of groups where steps take them as they arrive, by the rules of `order`. Pure.

Groups are counted as they change: those due by each step, and the complete ones among them. So a
question costs as much as there are due steps, however many groups wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from holdfast.adapters.rl.ledger.order import (
    Open,
    choose,
    fits,
    lacking,
    oldest_version,
    steps_without,
)
from holdfast.adapters.rl.ledger.taking import Taking, entry_at
from holdfast.ckpt.types import Json


class ByArrival(Taking):
    """Steps take complete groups, and wait for groups that would become too old."""

    def __init__(self, *, groups: int, eta: int) -> None:
        super().__init__(groups=groups, eta=eta)
        self._settled: tuple[int, ...] = ()
        self._lowest = {0: 0}
        self._count()

    def _count(self) -> None:
        """Sort the incomplete groups by the oldest version they may have; count the complete."""
        self._fresh: list[int] = []
        self._begun: dict[int, list[int]] = {}
        self._ready: Counter[int] = Counter()
        for ordinal in sorted(self._oldest):
            oldest = self._oldest[ordinal]
            if ordinal in self._complete:
                if oldest is not None:
                    self._ready[oldest] += 1
            elif oldest is None:
                self._fresh.append(ordinal)
            else:
                self._begun.setdefault(oldest, []).append(ordinal)

    def admit(self, ordinal: int, *, now: bool = False) -> None:
        """See `Taking.admit`."""
        super().admit(ordinal, now=now)
        insort(self._fresh, ordinal)

    def complete(self, ordinal: int, *, trains: bool = True) -> None:
        """See `Taking.complete`."""
        super().complete(ordinal, trains=trains)
        self._leave(ordinal)
        oldest = self._oldest[ordinal]
        if oldest is not None:
            self._ready[oldest] += 1

    def train(self, ordinals: Collection[int]) -> None:
        """See `Taking.train`."""
        self.ordinals()
        super().train(ordinals)
        self._settled = ()
        self._lowest[self.step] = self._lowest_open()

    def ordinals(self) -> Sequence[int] | None:
        """See `Taking.ordinals`."""
        if not self._settled and not self.lacking():
            self._settled = tuple(choose(self._open(), step=self.step, groups=self.groups) or ())
            self._ready -= Counter(
                oldest for o in self._settled if (oldest := self._oldest[o]) is not None
            )
        return self._settled or None

    def awaited(self) -> set[int]:
        """See `Taking.awaited`: those that are due first."""
        begun = (o for oldest in sorted(self._begun) for o in self._begun[oldest])
        wanted = self.lacking()
        found = {o for _, o in zip(range(wanted), begun, strict=False)}
        return found.union(self._fresh[: wanted - len(found)])

    def rank(self, ordinal: int) -> int:
        """See `Taking.rank`."""
        place = self.place(ordinal)
        return self.step + steps_without(place, lacking=self.lacking(), groups=self.groups)

    def begin(self, ordinal: int, version: int | None) -> int:
        """See `Taking.begin`: the worker's own version where possible, so that it need not wait.

        A worker without weights gets the second-newest version, which already exists.
        """
        oldest = self._oldest[ordinal]
        if oldest is None:
            least = oldest_version(self._due(), step=self._next, groups=self.groups, eta=self.eta)
            own = self.step - 1 if version is None else min(version, self.step)
            oldest = max(least, own)
            self._move(ordinal, oldest)
        return oldest

    def has_room(self, ordinal: int, oldest: int | None) -> bool:
        """See `Taking.has_room`."""
        known = self._oldest[ordinal]
        if oldest is None:
            self.begin(ordinal, None)
            return True
        if known is not None and known <= oldest:
            return True
        if ordinal in self._settled:
            return False
        due = self._due()
        due[oldest + self.eta] += 1
        if known is not None:
            due[known + self.eta] -= 1
        if not fits(+due, step=self._next, groups=self.groups):
            return False
        self._move(ordinal, oldest)
        return True

    def released(self, protected: int) -> int:
        """See `Taking.released`."""
        return entry_at(self._lowest, protected)

    # -- the order of incomplete groups ------------------------------------------------------------

    @property
    def begun(self) -> int:
        """Number of incomplete groups that were begun; they come before all others."""
        return sum(map(len, self._begun.values()))

    @property
    def fresh(self) -> Sequence[int]:
        """The groups that no worker has begun, ascending."""
        return self._fresh

    def is_begun(self, ordinal: int) -> bool:
        """Say whether a worker began an open group."""
        return self._oldest[ordinal] is not None

    def is_fresh(self, ordinal: int) -> bool:
        """Say whether a group waits for a worker to begin it."""
        return ordinal not in self._complete and self._oldest.get(ordinal, 0) is None

    def place(self, ordinal: int) -> int:
        """Return the number of incomplete groups that come before an incomplete one."""
        oldest = self._oldest[ordinal]
        if oldest is None:
            return self.begun + bisect_left(self._fresh, ordinal)
        earlier = sum(len(found) for at, found in self._begun.items() if at < oldest)
        return earlier + bisect_left(self._begun[oldest], ordinal)

    def lacking(self) -> int:
        """Return how many incomplete groups the next step that is not settled waits for."""
        return lacking(
            self._due(),
            {oldest + self.eta: count for oldest, count in self._ready.items()},
            complete=len(self._complete) - len(self._settled),
            step=self._next,
            groups=self.groups,
        )

    # -- checks and state --------------------------------------------------------------------------

    def check(self, admitted: int) -> list[str]:
        """See `Taking.check`."""
        found = super().check(admitted)
        if not fits(self._due(), step=self._next, groups=self.groups):
            due = sorted(self._due().elements())
            found.append(f"ordinals due by steps {due} cannot all be trained from {self._next} on")
        return found

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """See `Taking.load_state_dict`."""
        super().load_state_dict(state)
        self._settled = ()
        self._lowest = {self.step: self._lowest_open()}
        self._count()

    # -- inside ------------------------------------------------------------------------------------

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
        ]

    def _due(self) -> Counter[int]:
        """Return how many begun groups are due by each step; settled ones do not count."""
        due = Counter({oldest + self.eta: len(found) for oldest, found in self._begun.items()})
        for oldest, count in self._ready.items():
            due[oldest + self.eta] += count
        return +due

    def _leave(self, ordinal: int) -> None:
        """Remove an incomplete group from its place."""
        oldest = self._oldest[ordinal]
        found = self._fresh if oldest is None else self._begun[oldest]
        del found[bisect_left(found, ordinal)]
        if oldest is not None and not found:
            del self._begun[oldest]

    def _move(self, ordinal: int, oldest: int) -> None:
        """Set the oldest version that a group may have."""
        known = self._oldest[ordinal]
        if ordinal not in self._complete:
            self._leave(ordinal)
            insort(self._begun.setdefault(oldest, []), ordinal)
        else:
            self._ready[oldest] += 1
            if known is not None:
                self._ready[known] -= 1
                self._ready = +self._ready
        self._oldest[ordinal] = oldest
