"""What was seen of a running job, folded one event at a time: how far it is, who leads it. Pure."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

RESTARTED: Final = "restarted"
"""What is seen when a step is told of a newer attempt (generation) than ever before."""

_STEPS_REMEMBERED: Final = 16
_EVENTS_REMEMBERED: Final = 4096
_UNKEPT: Final = {"step", "samples", "state", "metric"}


class JobProgress:
    """What is known now.

    ``step`` is the newest step told complete, -1 for none, ``first_t`` when the first was (wall
    seconds). ``ranks`` maps seats to ranks; ``leader`` is the node that proposed the newest
    generation, "" while there is none. Events of a Holdfast job, or lines of its hooks' history.
    """

    def __init__(self) -> None:
        self.step = -1
        self.first_t: float | None = None
        self.ranks: dict[str, int] = {}
        self.leader = ""
        self._reached: list[tuple[int, float]] = []
        self._times: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_EVENTS_REMEMBERED))
        self._attempt: int | None = None
        self._last: dict[str, float] = {}
        self._own_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_STEPS_REMEMBERED))

    def take(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in new events."""
        for event in events:
            kind = event["kind"]
            if kind == "step":
                self._take_step(event)
            elif kind == "proposed":
                self.leader = event["node"]
                self.ranks = {seat: rank for rank, seat in enumerate(event["ranks"])}
            if kind not in _UNKEPT:
                self._times[kind].append(float(event["t"]))

    def _take_step(self, event: Mapping[str, Any]) -> None:
        t, step, rank = float(event["t"]), int(event["step"]), int(event["rank"])
        self.first_t = t if self.first_t is None else min(t, self.first_t)
        if step > self.step:
            self.step = step
            self._reached.append((step, t))
        attempt = int(event.get("attempt", event.get("generation", 0)))
        if self._attempt is not None and attempt > self._attempt:
            self._times[RESTARTED].append(t)
        self._attempt = max(attempt, self._attempt or 0)
        seat = event.get("seat", f"worker/{rank}")
        self.ranks[seat] = rank
        if "seconds" in event:
            self._own_s[seat].append(event["seconds"] - event.get("waited_s", 0.0))
        elif seat in self._last:
            self._own_s[seat].append(t - self._last[seat])
        self._last[seat] = t

    def complete_t(self, step: int) -> float | None:
        """Return when ``step``, or one behind it, was told complete first."""
        at = bisect.bisect_left(self._reached, step, key=lambda reached: reached[0])
        return self._reached[at][1] if at < len(self._reached) else None

    def first_after(self, kind: str, t: float) -> float | None:
        """Return when the first event of a kind after ``t`` was."""
        return min((each for each in self._times[kind] if each > t), default=None)

    def step_seconds(self, seat: str) -> float:
        """Return the median time of a worker's newest steps, 0 where none is known.

        Of a Holdfast job without the time it waited for others.
        """
        return statistics.median(self._own_s[seat]) if self._own_s[seat] else 0.0
