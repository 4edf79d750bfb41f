"""Progress of a running job, folded from its events one at a time: newest step, leader. Pure."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Final

from holdfast.elastic.events import Event, GenerationProposed, MetricsLogged, StepDone
from holdfast.tools.chaos.judging.record import StepCommit, Told
from holdfast.tools.chaos.scenarios.moments import RESTARTED, moment_of

_STEPS_REMEMBERED: Final = 16
_EVENTS_REMEMBERED: Final = 4096


class JobProgress:
    """The present state of a job, from Holdfast's events or the lines of hooks.

    ``step`` is the newest step reported complete, -1 for none; ``first_t`` is the wall-clock second
    of the first one. ``ranks`` maps seats to ranks; ``leader`` is the node that proposed the newest
    generation, "" while there is none.
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

    def take(self, found: Iterable[Told]) -> None:
        """Apply new reports."""
        for each in found:
            match each:
                case StepCommit(t=t, step=step, rank=rank, attempt=attempt):
                    self._take_step(t, step, attempt=attempt)
                    self._take_pace(f"worker/{rank}", t, rank=rank)
                case StepDone(time_s=t, step=step, rank=rank, generation=generation):
                    self._take_step(t, step, attempt=generation)
                    seat = each.seat or f"worker/{rank}"
                    own_s = each.seconds - each.waited_s if each.seconds else None
                    self._take_pace(seat, t, rank=rank, own_s=own_s)
                case GenerationProposed(node=node, ranks=ranks):
                    self.leader = node
                    self.ranks = {seat: rank for rank, seat in enumerate(ranks)}
            if isinstance(each, Event) and not isinstance(each, StepDone | MetricsLogged):
                self._times[moment_of(each)].append(each.time_s)

    def _take_step(self, t: float, step: int, *, attempt: int) -> None:
        self.first_t = t if self.first_t is None else min(t, self.first_t)
        if step > self.step:
            self.step = step
            self._reached.append((step, t))
        if self._attempt is not None and attempt > self._attempt:
            self._times[RESTARTED].append(t)
        self._attempt = max(attempt, self._attempt or 0)

    def _take_pace(self, seat: str, t: float, *, rank: int, own_s: float | None = None) -> None:
        """Record the duration of a worker's step: as reported, or since its last step."""
        self.ranks[seat] = rank
        if own_s is not None:
            self._own_s[seat].append(own_s)
        elif seat in self._last:
            self._own_s[seat].append(t - self._last[seat])
        self._last[seat] = t

    def complete_t(self, step: int) -> float | None:
        """Return the time at which ``step``, or a later one, was first reported complete."""
        at = bisect.bisect_left(self._reached, step, key=lambda reached: reached[0])
        return self._reached[at][1] if at < len(self._reached) else None

    def first_after(self, moment: str, t: float) -> float | None:
        """Return the time of the first event of a kind after ``t``; see `moments`."""
        return min((each for each in self._times[moment] if each > t), default=None)

    def step_seconds(self, seat: str) -> float:
        """Return the median duration of a worker's newest steps, 0 if none is known.

        For a Holdfast job the time spent waiting for other ranks is excluded.
        """
        return statistics.median(self._own_s[seat]) if self._own_s[seat] else 0.0
