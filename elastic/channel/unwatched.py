"""What the channels of processes without an agent have in common: nobody listens."""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast.ckpt.types import Json
from holdfast.elastic.events import EventWriter
from holdfast.elastic.membership.phases import WorkerPhase

EVENTS_ENV = "HOLDFAST_EVENTS"


class Unwatched:
    """The part of a `Channel` that speaks to an agent, where there is none."""

    def __init__(self, *, node: str, seat: str) -> None:
        self.node, self.seat, self.memory_of = node, seat, ""
        events = os.environ.get(EVENTS_ENV)
        self._events = EventWriter(Path(events), node=node) if events else None

    def leaving(self) -> bool:
        """Never: there is nobody to hand over to."""
        return False

    def halts(self, generation: int) -> bool:
        """Never: nobody joins."""
        return False

    def halted(self, *, generation: int, step: int) -> None:
        """Nobody waits for it."""

    def handed_over(self, *, generation: int, step: int) -> None:
        """Nobody waits for it."""

    def beat(self, *, step: int, phase: WorkerPhase, limit_s: float = 0.0) -> None:
        """Nobody watches."""

    def emit(self, kind: str, **fields: Json) -> None:
        """Write the event where ``HOLDFAST_EVENTS`` says."""
        if self._events:
            self._events.write(kind, source="worker", seat=self.seat, t=time.time(), fields=fields)
