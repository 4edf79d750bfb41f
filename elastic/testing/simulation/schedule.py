"""Virtual time: a queue of future callbacks, and a trace of past events."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from random import Random

from holdfast.elastic.coordinator.clock import VirtualClock

_MAX_TRACE = 4000


class Schedule:
    """Runs callbacks in the order of their virtual times; equal seeds give equal runs."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.clock = VirtualClock()
        self.trace: deque[str] = deque(maxlen=_MAX_TRACE)
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.clock.now_s()

    def after(self, delay_s: float, act: Callable[[], object]) -> None:
        """Call ``act`` after ``delay_s``."""
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._numbers), act))

    def soon(self, least_s: float, most_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` after a random delay."""
        self.after(self.random.uniform(least_s, most_s), act)

    def log(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now_s:9.3f} {text}")

    def run(self, until_s: float, *, stop: Callable[[], bool]) -> None:
        """Run callbacks until the time is reached, ``stop`` returns True, or none is left."""
        while self._queue and self._queue[0][0] <= until_s and not stop():
            at_s, _, act = heapq.heappop(self._queue)
            self.clock.advance(max(0.0, at_s - self.now_s))
            act()
