"""What the channels of processes without an agent have in common: nobody listens."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from holdfast.elastic.events import Event
from holdfast.elastic.events.log import EventWriter
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

    def emit(self, event: Event) -> None:
        """Write the event where ``HOLDFAST_EVENTS`` says."""
        if self._events:
            seated = msgspec.structs.replace(event, seat=self.seat)
            self._events.write(seated, source="worker")
