"""Limits of silence before it counts as a hang, and of the time that parking may take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from holdfast.elastic.decisions.standing import apart
from holdfast.elastic.membership.phases import Beat, WorkerPhase
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning.reach import all_asked, parted

_MEDIANS = 10.0
_LONGEST = 3.0
_PARKS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimits:
    """The limits of a rank's silence, in seconds.

    The limit learned from its steps stays between ``min_s`` and ``max_s``. ``first_s`` is for the
    first step of every generation, which may compile. ``pause_s`` is for work other than training:
    a pause that the loop announced without a limit, building the model, restoring.
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
    """Return the longest allowed silence of a rank whose last steps took ``step_seconds``.

    It is ten medians, or three times the longest step if that is more: one slow step (a checkpoint,
    a garbage collection) must not make the next one a hang.
    """
    if not step_seconds:
        return limits.first_s
    learned = max(_MEDIANS * median(step_seconds), _LONGEST * max(step_seconds))
    return min(max(limits.min_s, learned), limits.max_s)


def silence_limit_s(
    beat: Beat, step_seconds: Sequence[float], *, first: bool, limits: SilenceLimits
) -> float | None:
    """Return the limit of a rank's silence after ``beat``, None if silence means nothing.

    A rank that waits for others is never at fault. ``first``: it has completed no step of its
    generation.
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
    """Return the wait for others after which a rank reports it; all ranks may be waiting."""
    learned = learned_s(step_seconds, limits=limits)
    return max(learned, limits.first_s) if first else learned


def probe_limit_s(step_seconds: Sequence[float], *, first: bool, limits: SilenceLimits) -> float:
    """Return the wait for others after which an agent probes the other nodes.

    A probe is harmless, so a generation that forms or compiles gets no extra time here.
    """
    soon = learned_s(step_seconds, limits=limits) if step_seconds else limits.min_s
    return min(soon, stall_limit_s(step_seconds, first=first, limits=limits))


def stalled(view: JobView) -> bool:
    """Return whether every rank of the newest generation has waited too long for others.

    A collective of the user's that only some ranks have called is known sooner, also in a first
    step.

    Then no single rank is at fault that could be ended: a connection broke without an error, or the
    ranks wait in different collectives. By then all nodes have probed each other, and reach each
    other; otherwise `planning.reach` decides which nodes are left out.
    """
    members = view.generation.members if view.generation else ()
    homes = (view.nodes.get(member.node) for member in members)
    waits = bool(members) and all(node and node.stalled == view.number for node in homes)
    return (waits or apart(view)) and all_asked(view) and not parted(view)


def park_limit_s(quiet_seconds: Sequence[float], *, least_s: float, limits: SilenceLimits) -> float:
    """Return the time a fenced rank may take to park, from the longest silences of its steps.

    A rank checks the fence between microbatches, so a survivor in a long one needs that long. A
    rank without a completed step may be compiling, and should not have to repeat that.
    """
    if not quiet_seconds:
        return max(least_s, min(limits.first_s, limits.max_s))
    return max(least_s, min(_PARKS * max(quiet_seconds), limits.max_s))
