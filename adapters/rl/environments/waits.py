"""Waiting times of episodes for their environment, as events of a rollout worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from holdfast.elastic.events import EnvironmentWaits, Event

_EVERY_S = 5.0
_MOST = 256


def unheard(event: Event) -> None:
    """Record nothing."""


class Waits:
    """Collects waiting times, and reports them every five seconds or 256 replies.

    ``failed`` and ``given_up`` count attempts that failed or took too long, and calls whose last
    one did, since the last event.
    """

    def __init__(self, emit: Callable[[Event], None] = unheard) -> None:
        self.failed = self.given_up = 0
        self._emit, self._seconds = emit, list[float]()
        self._reported_s: float | None = None

    def add(self, seconds: float) -> None:
        """Record how long an episode waited for a reply."""
        self._seconds.append(seconds)

    def tell(self, *, waiting: int, now_s: float) -> None:
        """Record the collected figures, when there are enough; ``waiting`` episodes wait now."""
        if self._reported_s is None:
            self._reported_s = now_s
        due = now_s - self._reported_s >= _EVERY_S or len(self._seconds) >= _MOST
        if not due or not (self._seconds or self.failed):
            return
        self._emit(
            EnvironmentWaits(
                calls=len(self._seconds),
                p50_s=quantile(self._seconds, 0.5),
                p95_s=quantile(self._seconds, 0.95),
                p99_s=quantile(self._seconds, 0.99),
                longest_s=max(self._seconds, default=0.0),
                failed=self.failed,
                given_up=self.given_up,
                waiting=waiting,
            )
        )
        self._seconds.clear()
        self.failed = self.given_up = 0
        self._reported_s = now_s


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not below ``share`` of the values; 0 for no values."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
