"""The logbook: hands the metrics of each step to the user's loggers once, when it is protected.

A step that is repeated after a failure has not been handed over yet, because only protected steps
are. The steps that wait are part of the run's state. The position is part of it too, and the
process remembers it, so that a generation that restores an older position repeats nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.tracked.cursor import Cursor

Write: TypeAlias = Callable[[int, dict[str, float]], object]
"""A logger: takes the number of a step, as ``run.steps`` yields it, and its metrics."""

PROTECTED_WAIT_S = 10.0
"""Longest wait at the end of the loop for the protection of the last step, which is complete."""

_POLL_S = 0.02


class Position:
    """The numbers of steps that this process knows to be handed over and begun, over generations.

    ``begun`` are steps that began here; of two ranks, one may be in a step that the other has not
    begun, so the next ``may_begin`` as soon as this rank comes to the end of one.
    """

    def __init__(self) -> None:
        self.handed = self.begun = 0
        self.may_begin = False

    def enter(self, step: int) -> None:
        """Note that ``step`` begins on this rank."""
        self.begun, self.may_begin = max(self.begun, step + 1), False

    def near_end(self, step: int) -> None:
        """Note that all of ``step`` ran here; as soon as all ranks say so, the next may begin."""
        self.may_begin = step + 1 >= self.begun

    def hold(self) -> None:
        """Note that no rank begins another step before the world changes, or the loop is over."""
        self.may_begin = False

    @property
    def reached(self) -> int:
        """The number of steps that may have begun on some rank, as far as this one knows."""
        return self.begun + self.may_begin


class Logbook:
    """One rank's part; rank 0 hands over."""

    def __init__(self, cursor: Cursor, position: Position, *, leads: bool) -> None:
        self._cursor, self._position, self._leads = cursor, position, leads
        self._loggers: list[tuple[Write, int]] = []

    def hand_to(self, write: Write, *, after: int) -> None:
        """Begin to hand over to one more logger, which has all steps up to ``after`` already."""
        if not callable(write):
            raise ConfigError(
                f"run.on_protected({write!r}): give a function that takes a step and its metrics"
            )
        self._loggers.append((write, after))

    def report(self) -> tuple[float, float]:
        """Return this rank's part of the agreement at the end of a step, see `agreed`."""
        handed = self._position.handed
        if self._loggers and self._leads:  # a step is handed over once every logger has it
            handed = max(handed, min(after for _, after in self._loggers) + 1)
        return float(bool(self._loggers)), float(handed)

    def agreed(self, collects: float, handed: float) -> None:
        """Take the largest values of all ranks: whether one hands over, and how far it has."""
        cursor, position = self._cursor, self._position
        cursor.collects = cursor.collects or bool(collects)
        position.handed = max(position.handed, int(handed), cursor.handed)
        cursor.handed = position.handed
        cursor.waiting = [each for each in cursor.waiting if each[0] >= position.handed]

    def add(self, step: int, values: dict[str, float]) -> None:
        """Note the metrics of a complete step, without those that it did not log."""
        if self._cursor.collects and values and step >= self._position.handed:
            self._cursor.waiting.append((step, values))

    def hand_over(self, protected: int) -> None:
        """Hand over the first ``protected`` steps, as far as they wait."""
        if not self._loggers or not self._leads:
            return
        for step, values in self._cursor.waiting:
            if self._position.handed <= step < protected:
                for write, after in self._loggers:
                    if step > after:
                        write(step, dict(values))
                self._position.handed = step + 1

    def finish(self, protected: Callable[[], int], *, check: Callable[[], None]) -> None:
        """Hand over all steps that are left, once the last one is protected."""
        if not self._loggers or not self._leads or not self._cursor.waiting:
            return
        last = self._cursor.waiting[-1][0] + 1
        until_s = time.monotonic() + PROTECTED_WAIT_S
        while protected() < last and time.monotonic() < until_s:
            check()
            time.sleep(_POLL_S)
        self.hand_over(last)
