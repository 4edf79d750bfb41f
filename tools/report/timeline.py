"""From the events of a run to its story: faults, recoveries by phase, steps, goodput. Pure.

Times in the result are seconds since the job started, on the wall clock of the one machine (or
the synchronised clocks of the several) that wrote the events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of
from holdfast.tools.report.accounting import Interval, account

Event: TypeAlias = Mapping[str, Any]

KILL_NODE: Final = "kill_node"
KILL_ROLLOUT: Final = "kill_rollout"
KILL_TRAINER: Final = "kill_trainer"

PHASES: Final = ("detect_s", "agree_s", "reform_s", "restore_s", "reexecute_s")
"""The phases of a recovery, in order; their sum is ``total_s``."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something was hurt: ``step`` is the newest step completed before it."""

    time_s: float
    kind: str
    victim: str
    node: str
    step: int
    seats: tuple[str, ...] = ()


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What it took to go on after a fault; phases are None where the fault needs none of them."""

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

    It *stands* unless a later generation executed it, or an earlier one, again.
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
    """Everything the report shows of one job; ``shares`` add up to ``wall_s``."""

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
    """Return the story of ``events`` (any order, one job). Raises ``ValueError`` without any."""
    story = sorted(events, key=lambda event: float(event["t"]))
    if not story:
        raise ValueError("no events: nothing ran, or its run directory is another one")
    begin = next((e["t"] for e in story if e["kind"] == "job_started"), story[0]["t"])
    ended = next((e for e in reversed(story) if e["kind"] == "job_ended"), story[-1])
    wall_s = max(float(ended["t"]) - begin, 0.0)
    kinds: dict[str, list[Event]] = defaultdict(list)
    for event in story:
        kinds[event["kind"]].append({**event, "t": float(event["t"]) - begin})
    steps = _steps(kinds["step"], begin)
    generations = _generations(kinds, steps)
    faults = tuple(_fault(event, steps) for event in kinds["fault"])
    recoveries = tuple(_recovery(fault, kinds, generations, steps) for fault in faults)
    waits = {"waiting for rollouts": kinds["rollouts_awaited"], "held by the demo": kinds["held"]}
    claims = _intervals(wall_s, recoveries, generations, steps, waits=waits)
    shares = account(wall_s, claims)
    return Timeline(
        started_at=begin,
        wall_s=wall_s,
        ok=bool(ended.get("ok", False)),
        faults=faults,
        recoveries=recoveries,
        generations=generations,
        steps=steps,
        lives=_lives(kinds, faults, wall_s),
        shares=shares,
        goodput=shares["productive"] / wall_s if wall_s else 0.0,
    )


def _steps(events: Sequence[Event], begin: float) -> tuple[StepRun, ...]:
    firsts: dict[int, int] = {}
    for event in events:
        step, generation = int(event["step"]), int(event["generation"])
        firsts[generation] = min(step, firsts.get(generation, step))
    behind = _firsts_behind(firsts)
    runs = []
    for event in events:
        start = float(event["start"]) - begin if "start" in event else event["t"] - event["seconds"]
        runs.append(
            StepRun(
                step=event["step"],
                generation=event["generation"],
                rank=event["rank"],
                seat=event.get("seat", f"rank {event['rank']}"),
                node=event.get("node", ""),
                start_s=start,
                end_s=start + float(event["seconds"]),
                stands=event["step"] < behind[event["generation"]],
            )
        )
    return tuple(sorted(runs, key=lambda run: (run.end_s, run.rank)))


def _firsts_behind(firsts: Mapping[int, int]) -> dict[int, float]:
    """Return for every generation the earliest step that any later one began with."""
    found, earliest = dict[int, float](), inf
    for generation in sorted(firsts, reverse=True):
        found[generation] = earliest
        earliest = min(earliest, firsts[generation])
    return found


def _newest_step(steps: Sequence[StepRun], *, before_s: float) -> int:
    return max((run.step for run in steps if run.end_s <= before_s), default=0)


def _fault(event: Event, steps: Sequence[StepRun]) -> Fault:
    return Fault(
        time_s=event["t"],
        kind=event["what"],
        victim=event["victim"],
        node=event["on"],
        step=_newest_step(steps, before_s=event["t"]),
        seats=tuple(event["seats"]),
    )


def _generations(
    kinds: Mapping[str, Sequence[Event]], steps: Sequence[StepRun]
) -> tuple[GenerationSpan, ...]:
    spans = []
    joins = [e["t"] for e in kinds.get("detected", ()) if e.get("what") == "join"]
    previous_s = 0.0
    for event in _first_of_each(kinds.get("proposed", ())):
        number = event["generation"]
        restored = [e for e in kinds.get("restored", ()) if e["generation"] == number]
        ends = [run.end_s for run in steps if run.generation == number]
        restored_s = max((e["t"] for e in restored), default=event["t"])
        joined = any(previous_s <= t <= event["t"] for t in joins)
        spans.append(
            GenerationSpan(
                number=number,
                world=_world(event.get("ranks")),
                proposed_s=event["t"],
                restored_s=restored_s,
                end_s=max(ends, default=restored_s),
                restore_step=_restore_step(event, restored),
                restore_how=str(event.get("restore_how") or ""),
                reason=event.get("reason", ""),
                cause="start" if number == 1 else "join" if joined else "loss",
            )
        )
        previous_s = event["t"]
    return tuple(spans)


def _restore_step(proposed: Event, restored: Sequence[Event]) -> int | None:
    """Return the step that a generation goes on from; a checkpoint's is known to who restores."""
    found: int | None = proposed.get("restore_step")
    if found is None:
        steps = [e["step"] for e in restored if e.get("tier") == "checkpoint"]
        found = max(steps, default=None)
    return found


def _first_of_each(proposed: Sequence[Event]) -> list[Event]:
    first: dict[int, Event] = {}
    for event in proposed:
        first.setdefault(event["generation"], event)
    return [first[number] for number in sorted(first)]


def _world(ranks: object) -> int:
    return len(ranks) if isinstance(ranks, Sequence) else int(str(ranks or 0))


def _recovery(
    fault: Fault,
    kinds: Mapping[str, Sequence[Event]],
    generations: Sequence[GenerationSpan],
    steps: Sequence[StepRun],
) -> Recovery:
    seen_s = _detected(fault, kinds.get("detected", ()))
    span = _generation_after(fault, generations, steps)
    if _spares_trainers(fault) or span is None:
        return _handed_on(fault, seen_s, kinds.get("rollout_recovered", ()))
    number = span.number
    seen_s = span.proposed_s if seen_s is None else min(seen_s, span.proposed_s)
    reformed = [e["t"] for e in kinds.get("reformed", ()) if e["generation"] == number]
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
    """Whether a worker of another role was hit: then the trainers need no new generation."""
    return fault.victim in fault.seats and role_of(fault.victim) != TRAINER


def _detected(fault: Fault, events: Sequence[Event]) -> float | None:
    names = {fault.victim, *fault.seats}
    times = (e["t"] for e in events if e["t"] >= fault.time_s and e.get("victim") in names)
    return min(times, default=None)


def _generation_after(
    fault: Fault, generations: Sequence[GenerationSpan], steps: Sequence[StepRun]
) -> GenerationSpan | None:
    """The first generation proposed after the fault that got as far as completing a step."""
    stepped = {run.generation for run in steps}
    after = [span for span in generations if span.proposed_s >= fault.time_s]
    return next((span for span in after if span.number in stepped), after[0] if after else None)


def _handed_on(fault: Fault, seen_s: float | None, events: Sequence[Event]) -> Recovery:
    """A rollout worker's death: the trainers go on; its unfinished samples change hands."""
    names = {fault.victim, *fault.seats}
    handed = [e for e in events if e["t"] >= fault.time_s and e["worker"] in names]
    handed_s = handed[0]["t"] if handed else None
    ends = [t for t in (seen_s, handed_s) if t is not None]
    note = "no trainer was touched: nothing to re-form, restore or execute again"
    if handed:
        unfinished, tokens = handed[0]["unfinished"], handed[0]["tokens"]
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


def _lives(
    kinds: Mapping[str, Sequence[Event]], faults: Sequence[Fault], wall_s: float
) -> tuple[Life, ...]:
    exits = {(e["seat"], e["pid"]): e["t"] for e in kinds.get("worker_exited", ())}
    hurt = [(name, fault.time_s) for fault in faults for name in (fault.victim, *fault.seats)]
    lives = []
    for event in kinds.get("worker_started", ()):
        seat, pid = event["seat"], event["pid"]
        end_s = exits.get((seat, pid), wall_s)
        until = min((e["t"] for e in kinds["worker_started"] if _succeeds(e, event)), default=end_s)
        killed = [t for name, t in hurt if name == seat and event["t"] <= t <= min(until, end_s)]
        lives.append(
            Life(
                seat=seat,
                node=event.get("node", ""),
                pid=pid,
                attempt=event.get("attempt", 0),
                start_s=event["t"],
                end_s=min([end_s, *killed]),
                ending="killed" if killed else "exited" if (seat, pid) in exits else "running",
            )
        )
    return tuple(lives)


def _succeeds(later: Event, earlier: Event) -> bool:
    return bool(later["seat"] == earlier["seat"] and later["t"] > earlier["t"])


def _intervals(
    wall_s: float,
    recoveries: Sequence[Recovery],
    generations: Sequence[GenerationSpan],
    steps: Sequence[StepRun],
    *,
    waits: Mapping[str, Sequence[Event]],
) -> list[Interval]:
    """Everything that lays a claim to wall time; ``account`` settles what overlaps."""
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
        Interval(label, event["t"] - event["seconds"], event["t"])
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
