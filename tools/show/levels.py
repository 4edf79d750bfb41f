"""The importance of events: what people want to read, and what only a search finds. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from holdfast.elastic.events import (
    KINDS,
    Detected,
    Event,
    JobEnded,
    UserEvent,
    WorkerExited,
    WorkerRehearsed,
)
from holdfast.elastic.events.job import MOVED


class Importance(IntEnum):
    """The level of a line: ``debug``, ``info``, ``warning`` or ``error``."""

    DEBUG = 0
    INFO = 1
    WARNING = 2
    ERROR = 3

    @property
    def word(self) -> str:
        """The level as options and lines have it."""
        return self.name.lower()


LEVELS: Final = tuple(level.word for level in Importance)
"""The words of all levels, the least first."""

_OF_KIND: Final = {
    Importance.ERROR: (
        "checkpoint_failed",
        "checkpoint_unsaved",
        "restore_failed",
        "sidecar_failed",
        "violation",
    ),
    Importance.WARNING: (
        "approximate",
        "back_pressure",
        "checkpoint_retried",
        "checkpoint_skipped",
        "data_worker_died",
        "data_worker_stuck",
        "data_workers_forked",
        "detected",
        "disk_refused",
        "events_lost",
        "fault",
        "island_left",
        "loss",
        "node_exited",
        "recheck_skipped",
        "rollout_left",
        "sampled_unprotected",
        "snapshots_left_out",
        "stack",
        "straggler",
        "unprotected",
        "version_unavailable",
        "weights_refused",
    ),
    Importance.INFO: (
        "checkpoint_carried",
        "checkpoint_done",
        "checkpoint_progress",
        "checkpoint_started",
        "checkpoint_waiting",
        "fault_over",
        "fenced",
        "fencing",
        "halted",
        "handed_over",
        "island_joined",
        "job_ended",
        "job_started",
        "leaving",
        "proposed",
        "reachable",
        "resumed",
        "rollout_recovered",
        "seated",
        "shares",
        "sidecar_started",
        "straggler_over",
        "weights_given",
        "worker_exited",
        "worker_started",
    ),
}
_ORDERLY: Final = ("exit status 0", MOVED)
_LEVEL: Final = {kind: level for level, kinds in _OF_KIND.items() for kind in kinds}
assert _LEVEL.keys() <= KINDS.keys()


def importance(event: Event) -> Importance:
    """Return the level of an event; steps, values and other regular news are ``DEBUG``."""
    match event:
        case Detected(what="join") | UserEvent():
            return Importance.INFO
        case JobEnded(ok=False):
            return Importance.ERROR
        case WorkerExited(status=status) if status not in _ORDERLY:
            return Importance.WARNING
        case WorkerRehearsed(error=error, over=False) if error:
            return Importance.WARNING
        case _:
            return _LEVEL.get(event.kind, Importance.DEBUG)
