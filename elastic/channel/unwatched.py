"""The common part of the channels of processes without an agent."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from holdfast.ckpt.types import Json
from holdfast.elastic.events import Event
from holdfast.elastic.events.log import EventWriter
from holdfast.elastic.membership.phases import WorkerPhase
from holdfast.elastic.membership.records import TRAINER, GenerationRecord

EVENTS_ENV = "HOLDFAST_EVENTS"
"""Environment variable that names the file of events (JSON lines) of a process without an agent."""


class Unwatched:
    """The part of a `Channel` that talks to an agent, for processes that have none."""

    def __init__(self, *, node: str, seat: str) -> None:
        self.node, self.seat, self.memory_of = node, seat, ""
        events = os.environ.get(EVENTS_ENV)
        self._record: GenerationRecord | None = None
        self._events = EventWriter(Path(events), node=node) if events else None

    @property
    def role(self) -> str:
        """Always a trainer."""
        return TRAINER

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

    def roster_version(self) -> int:
        """Return the generation's number, 0 before the first."""
        return self._record.number if self._record else 0

    def await_roster(self, *, after: int, timeout_s: float) -> int:
        """Return at once if the roster is newer than ``after``, else after ``timeout_s``."""
        if self.roster_version() <= after:
            time.sleep(timeout_s)
        return self.roster_version()

    def beat(self, *, step: int, phase: WorkerPhase, limit_s: float = 0.0) -> None:
        """Do nothing: no agent watches."""

    def done(self, result: Json = None, *, lingers: bool = False) -> None:
        """Do nothing: the script continues by itself."""

    def fail(self, message: str, *, user_error: bool, fault: str = "") -> None:
        """Do nothing: the user sees the error itself, a launcher the exit status."""

    def emit(self, event: Event) -> None:
        """Write the event to the file of ``HOLDFAST_EVENTS``."""
        if self._events:
            seated = msgspec.structs.replace(event, seat=self.seat)
            self._events.write(seated, source="worker")
