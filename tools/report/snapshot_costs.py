"""The cost of a job's snapshots, summed over its events. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import TypeAlias

import msgspec

from holdfast.elastic.events import Event, StepDone, StepProtected
from holdfast.tools.terminal import readable

_Rank: TypeAlias = tuple[int, int]
"""(generation, rank)."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Stall as a share of the ranks' step time; seconds from the end of a step to its protection.

    ``discarded`` counts snapshots that were given up because the state changed during the copy, or
    because there was no room.
    """

    stall_share: float
    protected_median_s: float | None
    protected_max_s: float | None
    copied_bytes: int
    discarded: int

    def __str__(self) -> str:
        """Return the cost as one line for people."""
        text = f"snapshots held training for {self.stall_share:.1%} of the step time"
        if self.protected_median_s is not None and self.protected_max_s is not None:
            text += (
                f"; protected after {1000 * self.protected_median_s:.0f} ms (median; "
                f"{1000 * self.protected_max_s:.0f} ms at most)"
            )
        return f"{text}; {readable(self.copied_bytes)} copied, {self.discarded} discarded"


class Costs:
    """Sums the costs of events, in any order."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._stall_s = self._step_s = 0.0
        self._protected_s: list[float] = []
        self._copied: dict[_Rank, int] = {}
        self._discarded: dict[int, int] = {}
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Add an event of any kind."""
        match event:
            case StepProtected(seconds=seconds):
                self._protected_s.append(seconds)
            case StepDone(copied_bytes=int(copied)):
                at = (event.generation, event.rank)
                self._stall_s += event.stall_s
                self._step_s += event.seconds
                self._copied[at] = max(self._copied.get(at, 0), copied)
                # all ranks discard the same snapshots: their counts must not be summed
                before = self._discarded.get(event.generation, 0)
                self._discarded[event.generation] = max(before, event.discarded)

    def total(self) -> Cost | None:
        """Return the sum, None if no rank reported a step."""
        if not self._step_s:
            return None
        return Cost(
            stall_share=self._stall_s / self._step_s,
            protected_median_s=median(self._protected_s) if self._protected_s else None,
            protected_max_s=max(self._protected_s, default=None),
            copied_bytes=sum(self._copied.values()),
            discarded=sum(self._discarded.values()),
        )
