"""The time of an island's own steps, without what it waits for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_NEWEST: Final = 0.1
"""The share of the newest step in the mean of the recent ones."""


class OwnPace:
    """Measures steps from their begin to their end; the clock counts seconds.

    The first step of a generation is left out: it may compile, or load.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self._has_warmed = False
        self._steps, self._seconds = 0, 0.0
        self.recent_s = 0.0
        """The seconds of a step of late, 0 before one was measured."""

    def begin_step(self) -> None:
        """Note that a step begins now."""
        self._began_s = self._clock()

    def end_step(self) -> None:
        """Note that the step ends now."""
        if self._began_s is not None and self._has_warmed:
            step_s = self._clock() - self._began_s
            self._steps += 1
            self._seconds += step_s
            self.recent_s += (step_s - self.recent_s) * (_NEWEST if self.recent_s else 1.0)
        self._began_s, self._has_warmed = None, True

    def take_us(self) -> int:
        """Return the mean microseconds of the steps since the last call, 0 if there was none."""
        steps, seconds = self._steps, self._seconds
        self._steps, self._seconds = 0, 0.0
        return max(1, round(1e6 * seconds / steps)) if steps else 0
