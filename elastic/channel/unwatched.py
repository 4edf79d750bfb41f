"""The common part of the channels of processes without an agent."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from holdfast.elastic.events import Event
from holdfast.elastic.events.log import EventWriter
from holdfast.elastic.membership.phases import WorkerPhase

EVENTS_ENV = "HOLDFAST_EVENTS"
"""Environment variable that names the file of events (JSON lines) of a process without an agent."""


class Unwatched:
    """The part of a `Channel` that talks to an agent, for processes that have none."""

    def __init__(self, *, node: str, seat: str) -> None:
        self.node, self.seat, self.memory_of = node, seat, ""
        self.lease_s = 0.0
        events = os.environ.get(EVENTS_ENV)
        self._events = EventWriter(Path(events), node=node) if events else None

    def leaving(self) -> bool:
        """Return False: there is no other node to hand over to."""
        return False

    def halts(self, generation: int) -> bool:
        """Return False: no worker joins."""
        return False

    def halted(self, *, generation: int, step: int) -> None:
        """Do nothing: no agent waits for it."""

    def handed_over(self, *, generation: int, step: int) -> None:
        """Do nothing: no agent waits for it."""

    def beat(self, *, step: int, phase: WorkerPhase, limit_s: float = 0.0) -> None:
        """Do nothing: no agent watches."""

    def emit(self, event: Event) -> None:
        """Write the event to the file of ``HOLDFAST_EVENTS``."""
        if self._events:
            seated = msgspec.structs.replace(event, seat=self.seat)
            self._events.write(seated, source="worker")
