"""Experiment trackers as loggers of a run: opened at the first step that they get."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from holdfast.elastic.errors import ConfigError

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """An experiment tracker that `Run.log_to` takes; rank 0 alone calls it.

    Each generation begins it again, on any node: what it opens must be at a place that all can
    reach.
    """

    def begin(self) -> int:
        """Open the log for further steps; return the last step that it has, -1 for none."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Add a step. Once it returns, the end of this process does not lose the step."""

    def close(self) -> None:
        """Release the log."""


class OpenTracker:
    """A tracker of one generation, which is begun when its first step comes.

    A rehearsal, and a rank that hands nothing over, opens nothing.
    """

    def __init__(
        self, tracker: Tracker, *, pause: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """``pause`` is entered while the tracker works, so that its silence is not a hang."""
        for name in ("begin", "write", "close"):
            if not callable(getattr(tracker, name, None)):
                raise ConfigError(
                    f"run.log_to({tracker!r}): it has no {name}(); give a tracker of "
                    "holdfast.adapters.trackers, or an object with begin(), write(step, metrics) "
                    "and close()"
                )
        self._tracker, self._pause = tracker, pause
        self._last, self._is_open = -1, False

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Hand a step on, unless the tracker has it."""
        with self._pause():
            if not self._is_open:
                self._last, self._is_open = self._tracker.begin(), True
            if step > self._last:
                self._tracker.write(step, metrics)
                self._last = step

    def close(self) -> None:
        """Release the log; a failure is told, because every step is written already."""
        if self._is_open:
            self._is_open = False
            try:
                with self._pause():  # a long upload is no hang
                    self._tracker.close()
            except Exception:  # noqa: BLE001 - of a library of the user's choice; the run is over
                _log.warning("%r could not be closed", self._tracker, exc_info=True)
