"""Clocks, which are injected so that tests and simulations control time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow, and the wall clock for records people read."""

    def now_s(self) -> float:
        """Return monotonic seconds from an arbitrary origin: for deadlines and leases."""

    def wall_s(self) -> float:
        """Return seconds since the epoch: for events and reports, never for decisions."""


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Return `time.monotonic`."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return `time.time`."""
        return time.time()


class VirtualClock:
    """A clock that moves only when it is advanced."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the virtual time."""
        return self._now_s

    def wall_s(self) -> float:
        """Return the virtual time as well."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Jump forward."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now_s += seconds
