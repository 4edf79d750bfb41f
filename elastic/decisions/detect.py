"""When silence counts as a hang, and for how long a rank may take to leave. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from holdfast.elastic.membership.phases import Beat, WorkerPhase
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning.reach import all_asked, parted

_MEDIANS = 10.0
_LONGEST = 3.0
_PARKS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimits:
    """How long a rank may be silent, in seconds.

    What is learned from its steps stays between ``min_s`` and ``max_s``. ``first_s`` is for the
    first step of every generation, which may compile; ``pause_s`` for what is not training: a
    pause that the loop announced without saying how long, building the model, restoring.
    """

    min_s: float
    max_s: float
    first_s: float
    pause_s: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be positive")
        if self.min_s > self.max_s:
            raise ValueError(f"min_s {self.min_s} exceeds max_s {self.max_s}: give a range")


def learned_s(step_seconds: Sequence[float], *, limits: SilenceLimits) -> float:
    """Return the silence that is too long for a rank that took so long for its last steps.

    Ten medians, or three times the longest, whichever is more: one slow step (a checkpoint, a
    collection of garbage) must not make the next one a hang.
    """
    if not step_seconds:
        return limits.first_s
    learned = max(_MEDIANS * median(step_seconds), _LONGEST * max(step_seconds))
    return min(max(limits.min_s, learned), limits.max_s)


def silence_limit_s(
    beat: Beat, step_seconds: Sequence[float], *, first: bool, limits: SilenceLimits
) -> float | None:
    """Return how long a rank may be silent after ``beat``, None where silence says nothing.

    Who waits for others is never at fault. ``first``: it has completed no step of its generation.
    """
    match beat.phase:
        case WorkerPhase.WAIT | WorkerPhase.MEET:
            return None
        case WorkerPhase.COMPUTE:
            return stall_limit_s(step_seconds, first=first, limits=limits)
        case WorkerPhase.PAUSE if beat.limit_s:
            return beat.limit_s
        case _:
            return limits.pause_s


def stall_limit_s(step_seconds: Sequence[float], *, first: bool, limits: SilenceLimits) -> float:
    """Return after what wait for the others a rank says so: they may all be waiting."""
    learned = learned_s(step_seconds, limits=limits)
    return max(learned, limits.first_s) if first else learned


def probe_limit_s(step_seconds: Sequence[float], *, first: bool, limits: SilenceLimits) -> float:
    """Return after what wait for the others an agent asks whom its node reaches.

    That hurts nobody, so a generation that forms, or compiles, is not given the time it may take.
    """
    soon = learned_s(step_seconds, limits=limits) if step_seconds else limits.min_s
    return min(soon, stall_limit_s(step_seconds, first=first, limits=limits))


def stalled(view: JobView) -> bool:
    """Whether every rank of the newest generation waits for others, for too long.

    Then nobody is at fault that could be ended: a connection broke that nobody sees broken, or the
    ranks wait in different collectives. All nodes have asked each other by then, and reach each
    other: where some do not it is `planning.reach` that says who is left out.
    """
    members = view.generation.members if view.generation else ()
    homes = (view.nodes.get(member.node) for member in members)
    waits = bool(members) and all(node and node.stalled == view.number for node in homes)
    return waits and all_asked(view) and not parted(view)


def park_limit_s(quiet_seconds: Sequence[float], *, least_s: float, limits: SilenceLimits) -> float:
    """Return how long a fenced rank may take to notice, from the longest silences of its steps.

    It looks at the fence between microbatches, so a survivor in a long one needs that long. A
    rank that has no step behind it yet may be compiling, which should not have to be done again.
    """
    if not quiet_seconds:
        return max(least_s, min(limits.first_s, limits.max_s))
    return max(least_s, min(_PARKS * max(quiet_seconds), limits.max_s))
