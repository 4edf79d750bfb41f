"""The checkpoints of a run by their events: written, failed, skipped. Pure."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Final

from holdfast.elastic.events import (
    CheckpointCarried,
    CheckpointDone,
    CheckpointFailed,
    CheckpointProgress,
    CheckpointRetried,
    CheckpointSkipped,
    CheckpointStarted,
    CheckpointUnsaved,
    CheckpointWaiting,
    Event,
)
from holdfast.tools.live.view import CheckpointsView, CheckpointView

_KEPT: Final = 64
_ORDER: Final = ("writing", "skipped", "failed", "durable")
"""States of a checkpoint; several nodes tell of one, and the last of these counts."""


@dataclass(slots=True)
class Writing:
    """A checkpoint's row while its events come in."""

    step: int
    state: str = "writing"
    at_s: float = -math.inf
    size_bytes: int | None = None
    seconds: float | None = None
    bytes_per_s: int | None = None
    done: float | None = None
    retries: int = 0
    why: str = ""

    def become(self, state: str, at_s: float) -> bool:
        """Enter a state if it outranks the present one; say whether it is new."""
        if _ORDER.index(state) <= _ORDER.index(self.state):
            self.at_s = max(self.at_s, at_s) if state == self.state == "writing" else self.at_s
            return False
        self.state, self.at_s = state, at_s
        return True


class Checkpointing:
    """Folds the events of checkpoints; the rows of the newest steps stay."""

    def __init__(self) -> None:
        self._rows: dict[int, Writing] = {}
        self._steps: list[int] = []
        self._left_out = -1
        self._done = self._failed = self._skipped = 0
        self._durable, self._durable_s = -1, -math.inf
        self._failing: tuple[float, int] = (-math.inf, 0)

    def apply(self, event: Event) -> None:
        """Take over an event of any kind."""
        match event:
            case CheckpointStarted(step=step) if row := self._row(step):
                row.size_bytes = event.bytes
                row.become("writing", event.time_s)
            case CheckpointProgress(step=step) if (row := self._row(step)) and event.total_bytes:
                row.done = max(row.done or 0.0, event.bytes / event.total_bytes)
                row.become("writing", event.time_s)
            case CheckpointWaiting(step=step, done=done) if row := self._row(step):
                row.done = max(row.done or 0.0, done)
            case CheckpointDone(step=step) if row := self._row(step):
                if row.become("durable", event.time_s):
                    self._done += 1
                row.size_bytes, row.seconds = event.bytes, event.seconds
                row.bytes_per_s, row.done, row.why = event.bytes_per_s, 1.0, ""
                if step > self._durable:
                    self._durable, self._durable_s = step, row.at_s
            case _:
                self._troubled(event)

    def _troubled(self, event: Event) -> None:
        match event:
            case CheckpointRetried(step=step, error=error) if row := self._row(step):
                row.retries, row.why = max(row.retries, event.attempt), error
            case CheckpointCarried(step=step) if row := self._row(step):
                row.why = "carried over to the new generation"
            case CheckpointSkipped(step=step, reason=reason) if row := self._row(step):
                if row.become("skipped", event.time_s):
                    self._skipped, row.why = self._skipped + 1, reason
            case CheckpointFailed(step=step, error=error) if row := self._row(step):
                if row.become("failed", event.time_s):
                    self._failed, row.why = self._failed + 1, error
                if event.time_s >= self._failing[0]:
                    self._failing = event.time_s, event.in_a_row
            case CheckpointUnsaved(step=step, error=error) if row := self._row(step):
                if row.become("failed", event.time_s):
                    self._failed, row.why = self._failed + 1, error

    def _row(self, step: int) -> Writing | None:
        """Return the row of a step; None for one that is older than all that are kept."""
        if (found := self._rows.get(step)) is not None:
            return found
        if step <= self._left_out:
            return None
        heapq.heappush(self._steps, step)
        self._rows[step] = Writing(step)
        if len(self._steps) > _KEPT:
            self._left_out = heapq.heappop(self._steps)
            del self._rows[self._left_out]
        return self._rows.get(step)

    def view(self) -> CheckpointsView:
        """Return the newest checkpoints, the newest first, and the counts."""
        in_a_row = self._failing[1] if self._failing[0] > self._durable_s else 0
        return CheckpointsView(
            newest=tuple(
                CheckpointView(
                    step=row.step,
                    state=row.state,
                    at_s=row.at_s if math.isfinite(row.at_s) else 0.0,
                    size_bytes=row.size_bytes,
                    seconds=row.seconds,
                    bytes_per_s=row.bytes_per_s,
                    done=row.done,
                    retries=row.retries,
                    why=row.why,
                )
                for row in sorted(self._rows.values(), key=lambda row: -row.step)
            ),
            durable_step=self._durable if self._durable >= 0 else None,
            durable_s=self._durable_s if self._durable >= 0 else None,
            done=self._done,
            failed=self._failed,
            skipped=self._skipped,
            in_a_row=in_a_row,
        )
