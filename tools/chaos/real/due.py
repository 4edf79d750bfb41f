"""Selection of the strikes that are due. Pure: the caller supplies the time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.tools.chaos.real.seen import JobProgress
    from holdfast.tools.chaos.scenarios.scenario import When
    from holdfast.tools.chaos.scenarios.strikes import Strike


class Due:
    """The strikes still to come."""

    def __init__(self, strikes: Iterable[Strike]) -> None:
        self.left = list(strikes)
        self._struck_t = math.nan
        self._begun: dict[tuple[str, When], float] = {}

    def take(self, seen: JobProgress, *, now: float) -> list[Strike]:
        """Return the strikes that are due at wall-clock second ``now``, in order of their moments.

        Of the strikes that wait for the same event, one is returned at a time: the next waits for
        another.
        """
        coming = [(at, each) for each in self.left if (at := self.moment(each, seen)) <= now]
        taken: list[Strike] = []
        for _, strike in sorted(coming, key=lambda pair: (pair[0], pair[1].number)):
            key = (strike.kind, strike.when)
            if strike.when.state or strike.when.recovery:
                if any((each.kind, each.when) == key for each in taken):
                    continue
                self._begun[key] = now
            taken.append(strike)
            self.left.remove(strike)
        return taken

    def struck(self, t: float) -> None:
        """Note that a strike took place at wall-clock second ``t``."""
        self._struck_t = t

    def moment(self, strike: Strike, seen: JobProgress) -> float:
        """Return the wall-clock second at which to strike, infinity while it is unknown."""
        when = strike.when
        found: float | None = None
        if when.s is not None:
            found = None if seen.first_t is None else seen.first_t + when.s
        elif when.step is not None:
            found = seen.complete_t(when.step)
        elif when.state is not None:
            found = seen.first_after(when.state, self._begun.get((strike.kind, when), -math.inf))
        elif when.recovery is not None and not math.isnan(self._struck_t):
            found = seen.first_after(when.recovery, self._struck_t)
        return math.inf if found is None else found + when.after_s
