"""The recovery of a job from one fault and its phases, read from the job's events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.elastic.events import (
    Detected,
    Event,
    GenerationProposed,
    RankReformed,
    StateRestored,
    StepDone,
    of_kind,
)

PHASES: Final = {
    "detected": "detect",
    "proposed": "agree",
    "reformed": "form",
    "restored": "restore",
    "begun": "begin",
}
"""The ends of the phases of a recovery, in order, and the names of the phases.

They last from the fault until its detection, until the next generation is planned, until every rank
is in its group, until every rank has its state, until every rank has begun its first step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRecovery:
    """A completed recovery or planned change. Times are wall-clock seconds of the events.

    ``began_s`` is the time of the fault, or for a planned change the end of the last step before
    it. ``ends_s`` holds the end of each phase that took place. ``step_s`` is the time when the
    first step was complete on every rank, ``new_s`` the time when the first step was complete that
    had not been done before. ``sent_bytes`` of the state travelled between hosts during the pause.
    """

    began_s: float
    ends_s: Mapping[str, float]
    step_s: float
    new_s: float
    generation: int
    world: int
    lost_steps: int
    sent_bytes: int = 0

    @property
    def pause_s(self) -> float:
        """Seconds from the fault until every rank was training again."""
        return self.ends_s["begun"] - self.began_s

    @property
    def useful_s(self) -> float:
        """Seconds from the fault until every rank had completed a step not done before."""
        return self.new_s - self.began_s

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase under the names in `PHASES`."""
        found, since = {}, self.began_s
        for end, name in PHASES.items():
            if end in self.ends_s:
                found[name], since = self.ends_s[end] - since, self.ends_s[end]
        return found


def after_fault(events: Sequence[Event], *, killed_s: float) -> MeasuredRecovery | None:
    """Return the recovery from a kill at ``killed_s``, None while it is not complete."""
    before = [event for event in of_kind(events, StepDone) if event.time_s <= killed_s]
    return _recovery(events, since_s=killed_s, began_s=killed_s, before=before)


def after_restart(
    events: Sequence[Event], *, before: Sequence[Event], killed_s: float
) -> MeasuredRecovery | None:
    """Return the recovery of a run that was killed whole at ``killed_s``, and started again.

    ``before`` are the events of the run until then; the generations of the next are counted anew.
    """
    steps = of_kind(before, StepDone)
    return _recovery(events, since_s=killed_s, began_s=killed_s, before=steps, older=0)


def after_loss(events: Sequence[Event], *, killed_s: float, others: int) -> MeasuredRecovery | None:
    """Return the recovery of ``others`` replicas from a kill at ``killed_s``, each in its own time.

    For replicas that repeat no step, and that need not all take part in the next one.
    """
    later = [event for event in of_kind(events, StepDone) if event.began_s > killed_s]
    firsts = {event.seat: event for event in reversed(later)}
    if len(firsts) < others:
        return None
    begun_s = max(event.began_s for event in firsts.values())
    formed = [e.time_s for e in of_kind(events, RankReformed) if killed_s < e.time_s <= begun_s]
    done_s = max(event.time_s for event in firsts.values())
    return MeasuredRecovery(
        began_s=killed_s,
        ends_s={**({"reformed": max(formed)} if formed else {}), "begun": begun_s},
        step_s=done_s,
        new_s=done_s,
        generation=max(event.generation for event in firsts.values()),
        world=others,
        lost_steps=0,
    )


def after_change(events: Sequence[Event], *, since_s: float, world: int) -> MeasuredRecovery | None:
    """Return the change to ``world`` ranks after ``since_s``, None while it is not complete.

    The change was planned: its cost begins at the end of the last step before it.
    """
    formed = of_kind(events, RankReformed)
    changed = [event for event in formed if event.time_s > since_s and event.world == world]
    if not changed:
        return None
    generation = changed[0].generation
    before = [event for event in of_kind(events, StepDone) if event.generation < generation]
    if not before:
        return None
    ended_s = max(event.time_s for event in before)
    return _recovery(events, since_s=since_s, began_s=ended_s, before=before, least=generation)


def _recovery(
    events: Sequence[Event],
    *,
    since_s: float,
    began_s: float,
    before: Sequence[StepDone],
    least: int = 0,
    older: int | None = None,
) -> MeasuredRecovery | None:
    if older is None:
        older = max((event.generation for event in before), default=0)
    done = max((event.step for event in before), default=-1)
    later = [event for event in events if event.time_s > since_s]
    every = of_kind(later, StepDone)
    steps = [e for e in every if e.generation > older and e.generation >= least]
    if not steps:
        return None
    generation = min(event.generation for event in steps)
    reformed = [e for e in of_kind(later, RankReformed) if e.generation == generation]
    restored = [e for e in of_kind(later, StateRestored) if e.generation == generation]
    proposed = [e for e in of_kind(later, GenerationProposed) if e.generation == generation]
    world = max((event.world for event in reformed), default=0)
    first = min(event.step for event in steps)
    ranks = {event.seat: event for event in reversed(steps) if event.step == first}
    new = {event.seat: event.time_s for event in reversed(steps) if event.step == done + 1}
    if not world or len(ranks) < world or len(new) < world:
        return None
    phases: dict[str, Sequence[Event]] = {
        "proposed": proposed,
        "reformed": reformed,
        "restored": restored,
    }
    ends_s = {name: max(e.time_s for e in found) for name, found in phases.items() if found}
    seen = [e.time_s for e in of_kind(later, Detected) if e.time_s >= began_s]
    if seen and min(seen) <= ends_s.get("proposed", 0.0):
        ends_s = {"detected": min(seen), **ends_s}
    ends_s["begun"] = max(event.began_s for event in ranks.values())
    return MeasuredRecovery(
        began_s=began_s,
        ends_s=ends_s,
        step_s=max(event.time_s for event in ranks.values()),
        new_s=max(new.values()),
        generation=generation,
        world=world,
        lost_steps=done + 1 - first,
        sent_bytes=sum(event.sent_bytes for event in restored),
    )
