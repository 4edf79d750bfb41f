"""The timeline of a run, built from its events: faults, recoveries, steps, goodput. Pure.

Times in the result are seconds since the job started, by the wall clock of the one machine (or the
synchronised clocks of the several machines) that wrote the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Final

import msgspec

from holdfast.elastic.events import (
    Detected,
    Event,
    FaultInjected,
    GenerationProposed,
    JobEnded,
    JobStarted,
    RankReformed,
    RolloutRecovered,
    RolloutsAwaited,
    StateRestored,
    StepDone,
    TrainingHeld,
    WorkerExited,
    WorkerStarted,
    of_kind,
)
from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of
from holdfast.tools.report.accounting import Interval, account

KILL_NODE: Final = "kill_node"
KILL_ROLLOUT: Final = "kill_rollout"
KILL_TRAINER: Final = "kill_trainer"

PHASES: Final = ("detect_s", "agree_s", "reform_s", "restore_s", "reexecute_s")
"""The phases of a recovery, in order; their sum is ``total_s``."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An injected fault; ``step`` is the newest step completed before it."""

    time_s: float
    kind: str
    victim: str
    node: str
    step: int
    seats: tuple[str, ...] = ()


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """The recovery after a fault; a phase is None if the fault does not need it."""

    kind: str
    victim: str
    time_s: float
    generation: int | None
    restore_step: int | None
    restore_how: str
    detect_s: float | None
    agree_s: float | None
    reform_s: float | None
    restore_s: float | None
    reexecute_s: float | None
    total_s: float | None
    steps_lost: int
    note: str


class StepRun(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's execution of a step.

    It *stands* unless a later generation executed the step, or an earlier step, again.
    """

    step: int
    generation: int
    rank: int
    seat: str
    node: str
    start_s: float
    end_s: float
    stands: bool


class GenerationSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A generation from its proposal to the end of its last step."""

    number: int
    world: int
    proposed_s: float
    restored_s: float
    end_s: float
    restore_step: int | None
    restore_how: str
    reason: str
    cause: str


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process from start to end; ``ending`` is "killed", "exited" or "running"."""

    seat: str
    node: str
    pid: int
    attempt: int
    start_s: float
    end_s: float
    ending: str


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The values that the report shows of one job; ``shares`` add up to ``wall_s``."""

    started_at: float
    wall_s: float
    ok: bool
    faults: tuple[Fault, ...]
    recoveries: tuple[Recovery, ...]
    generations: tuple[GenerationSpan, ...]
    steps: tuple[StepRun, ...]
    lives: tuple[Life, ...]
    shares: dict[str, float]
    goodput: float


def build(events: Iterable[Event]) -> Timeline:
    """Return the timeline of ``events`` (any order, one job).

    Raises ``ValueError`` if there are none.
    """
    found = sorted(events, key=lambda event: event.time_s)
    if not found:
        raise ValueError(
            "the run directory has no events: no job ran, or it used another directory"
        )
    begin_s = next(iter(of_kind(found, JobStarted)), found[0]).time_s
    ended = next(iter(reversed(of_kind(found, JobEnded))), None)
    wall_s = max((ended or found[-1]).time_s - begin_s, 0.0)
    story = [_since(event, begin_s) for event in found]
    steps = _steps(of_kind(story, StepDone))
    generations = _generations(story, steps)
    faults = tuple(_fault(event, steps) for event in of_kind(story, FaultInjected))
    recoveries = tuple(_recovery(fault, story, generations, steps) for fault in faults)
    waits: dict[str, Sequence[RolloutsAwaited] | Sequence[TrainingHeld]] = {
        "waiting for rollouts": of_kind(story, RolloutsAwaited),
        "held by the demo": of_kind(story, TrainingHeld),
    }
    claims = _intervals(wall_s, recoveries, generations, steps, waits=waits)
    shares = account(wall_s, claims)
    return Timeline(
        started_at=begin_s,
        wall_s=wall_s,
        ok=ended is not None and ended.ok,
        faults=faults,
        recoveries=recoveries,
        generations=generations,
        steps=steps,
        lives=_lives(story, faults, wall_s),
        shares=shares,
        goodput=shares["productive"] / wall_s if wall_s else 0.0,
    )


def _since(event: Event, begin_s: float) -> Event:
    """Return an event with its times in seconds since the job began."""
    time_s = event.time_s - begin_s
    if isinstance(event, StepDone):
        return msgspec.structs.replace(event, time_s=time_s, start_s=event.began_s - begin_s)
    return msgspec.structs.replace(event, time_s=time_s)


def _steps(events: Sequence[StepDone]) -> tuple[StepRun, ...]:
    firsts: dict[int, int] = {}
    for event in events:
        firsts[event.generation] = min(event.step, firsts.get(event.generation, event.step))
    behind = _firsts_behind(firsts)
    runs = [
        StepRun(
            step=event.step,
            generation=event.generation,
            rank=event.rank,
            seat=event.seat or f"rank {event.rank}",
            node=event.node,
            start_s=event.start_s,
            end_s=event.start_s + event.seconds,
            stands=event.step < behind[event.generation],
        )
        for event in events
    ]
    return tuple(sorted(runs, key=lambda run: (run.end_s, run.rank)))


def _firsts_behind(firsts: Mapping[int, int]) -> dict[int, float]:
    """Return for every generation the earliest step with which any later one began."""
    found, earliest = dict[int, float](), inf
    for generation in sorted(firsts, reverse=True):
        found[generation] = earliest
        earliest = min(earliest, firsts[generation])
    return found


def _newest_step(steps: Sequence[StepRun], *, before_s: float) -> int:
    return max((run.step for run in steps if run.end_s <= before_s), default=0)


def _fault(event: FaultInjected, steps: Sequence[StepRun]) -> Fault:
    return Fault(
        time_s=event.time_s,
        kind=event.what,
        victim=event.victim,
        node=event.on,
        step=_newest_step(steps, before_s=event.time_s),
        seats=event.seats,
    )


def _generations(story: Sequence[Event], steps: Sequence[StepRun]) -> tuple[GenerationSpan, ...]:
    spans = []
    joins = [event.time_s for event in of_kind(story, Detected) if event.what == "join"]
    restores = of_kind(story, StateRestored)
    previous_s = 0.0
    for event in _first_of_each(of_kind(story, GenerationProposed)):
        number = event.generation
        restored = [event for event in restores if event.generation == number]
        ends = [run.end_s for run in steps if run.generation == number]
        restored_s = max((e.time_s for e in restored), default=event.time_s)
        joined = any(previous_s <= t <= event.time_s for t in joins)
        spans.append(
            GenerationSpan(
                number=number,
                world=len(event.ranks),
                proposed_s=event.time_s,
                restored_s=restored_s,
                end_s=max(ends, default=restored_s),
                restore_step=_restore_step(event, restored),
                restore_how=event.restore_how,
                reason=event.reason,
                cause="start" if number == 1 else "join" if joined else "loss",
            )
        )
        previous_s = event.time_s
    return tuple(spans)


def _restore_step(proposed: GenerationProposed, restored: Sequence[StateRestored]) -> int | None:
    """Return the step that a generation resumes from.

    Only the ranks that restore from a checkpoint know its step, so their events give it.
    """
    if proposed.restore_step is not None:
        return proposed.restore_step
    return max((event.step for event in restored if event.tier == "checkpoint"), default=None)


def _first_of_each(proposed: Sequence[GenerationProposed]) -> list[GenerationProposed]:
    first: dict[int, GenerationProposed] = {}
    for event in proposed:
        first.setdefault(event.generation, event)
    return [first[number] for number in sorted(first)]


def _recovery(
    fault: Fault,
    story: Sequence[Event],
    generations: Sequence[GenerationSpan],
    steps: Sequence[StepRun],
) -> Recovery:
    seen_s = _detected(fault, of_kind(story, Detected))
    span = _generation_after(fault, generations, steps)
    if _spares_trainers(fault) or span is None:
        return _handed_on(fault, seen_s, of_kind(story, RolloutRecovered))
    number = span.number
    seen_s = span.proposed_s if seen_s is None else min(seen_s, span.proposed_s)
    reformed = [e.time_s for e in of_kind(story, RankReformed) if e.generation == number]
    reformed_s = max(max(reformed, default=span.proposed_s), span.proposed_s)
    restored_s = max(span.restored_s, reformed_s)
    done = max((run.step for run in steps if run.generation < number), default=0)
    restore_step = span.restore_step or 0
    redone = [run.end_s for run in steps if run.generation >= number and run.step == done]
    caught_up_s = max(redone[0], restored_s) if redone and done > restore_step else restored_s
    return Recovery(
        kind=fault.kind,
        victim=fault.victim,
        time_s=fault.time_s,
        generation=number,
        restore_step=span.restore_step,
        restore_how=span.restore_how,
        detect_s=seen_s - fault.time_s,
        agree_s=span.proposed_s - seen_s,
        reform_s=reformed_s - span.proposed_s,
        restore_s=restored_s - reformed_s,
        reexecute_s=caught_up_s - restored_s,
        total_s=caught_up_s - fault.time_s,
        steps_lost=max(done - restore_step, 0),
        note=span.reason,
    )


def _spares_trainers(fault: Fault) -> bool:
    """True if the fault hit a worker of another role: the trainers then need no new generation."""
    return fault.victim in fault.seats and role_of(fault.victim) != TRAINER


def _detected(fault: Fault, events: Sequence[Detected]) -> float | None:
    names = {fault.victim, *fault.seats}
    times = (e.time_s for e in events if e.time_s >= fault.time_s and e.victim in names)
    return min(times, default=None)


def _generation_after(
    fault: Fault, generations: Sequence[GenerationSpan], steps: Sequence[StepRun]
) -> GenerationSpan | None:
    """Return the first generation after the fault that completed a step, else the first one."""
    stepped = {run.generation for run in steps}
    after = [span for span in generations if span.proposed_s >= fault.time_s]
    return next((span for span in after if span.number in stepped), after[0] if after else None)


def _handed_on(fault: Fault, seen_s: float | None, events: Sequence[RolloutRecovered]) -> Recovery:
    """Return the recovery of a rollout worker: its unfinished samples go on elsewhere.

    The trainers continue without a new generation.
    """
    names = {fault.victim, *fault.seats}
    handed = [e for e in events if e.time_s >= fault.time_s and e.worker in names]
    handed_s = handed[0].time_s if handed else None
    ends = [t for t in (seen_s, handed_s) if t is not None]
    note = "no trainer was touched: nothing to re-form, restore or execute again"
    if handed:
        unfinished, tokens = handed[0].unfinished, handed[0].tokens
        note += f"; {unfinished} unfinished samples went on elsewhere, {tokens} tokens from its log"
    return Recovery(
        kind=fault.kind,
        victim=fault.victim,
        time_s=fault.time_s,
        generation=None,
        restore_step=None,
        restore_how="",
        detect_s=None if seen_s is None else seen_s - fault.time_s,
        agree_s=None,
        reform_s=None,
        restore_s=None,
        reexecute_s=None,
        total_s=max(ends) - fault.time_s if ends else None,
        steps_lost=0,
        note=note,
    )


def _lives(story: Sequence[Event], faults: Sequence[Fault], wall_s: float) -> tuple[Life, ...]:
    starts = of_kind(story, WorkerStarted)
    exits = {(e.seat, e.pid): e.time_s for e in of_kind(story, WorkerExited)}
    hurt = [(name, fault.time_s) for fault in faults for name in (fault.victim, *fault.seats)]
    lives = []
    for event in starts:
        seat, pid = event.seat, event.pid
        end_s = exits.get((seat, pid), wall_s)
        until = min((e.time_s for e in starts if _succeeds(e, event)), default=end_s)
        killed = [t for name, t in hurt if name == seat and event.time_s <= t <= min(until, end_s)]
        lives.append(
            Life(
                seat=seat,
                node=event.node,
                pid=pid,
                attempt=event.attempt,
                start_s=event.time_s,
                end_s=min([end_s, *killed]),
                ending="killed" if killed else "exited" if (seat, pid) in exits else "running",
            )
        )
    return tuple(lives)


def _succeeds(later: WorkerStarted, earlier: WorkerStarted) -> bool:
    return later.seat == earlier.seat and later.time_s > earlier.time_s


def _intervals(
    wall_s: float,
    recoveries: Sequence[Recovery],
    generations: Sequence[GenerationSpan],
    steps: Sequence[StepRun],
    *,
    waits: Mapping[str, Sequence[RolloutsAwaited] | Sequence[TrainingHeld]],
) -> list[Interval]:
    """Return all claims to wall time; ``account`` settles the overlaps."""
    claims = [
        Interval("productive" if run.stands else "re-executed", run.start_s, run.end_s)
        for run in steps
    ]
    for recovery in recoveries:
        if recovery.generation is None or recovery.total_s is None:
            continue
        restored_s = recovery.time_s + recovery.total_s - (recovery.reexecute_s or 0.0)
        claims.append(Interval("recovery", recovery.time_s, restored_s))
        before = [run.end_s for run in steps if run.end_s <= recovery.time_s]
        claims.append(Interval("interrupted step", max(before, default=0.0), recovery.time_s))
    claims += [
        Interval(label, event.time_s - event.seconds, event.time_s)
        for label, events in waits.items()
        for event in events
    ]
    claims += [
        Interval("join", span.proposed_s, span.restored_s)
        for span in generations
        if span.cause == "join"
    ]
    first_s = min((run.start_s for run in steps), default=wall_s)
    last_s = max((run.end_s for run in steps), default=wall_s)
    claims.append(Interval("startup", 0.0, first_s))
    claims.append(Interval("shutdown", last_s, wall_s))
    return claims
