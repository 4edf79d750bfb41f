"""The report's timeline of a job, from the job's reports and the strikes. Pure.

A Holdfast job reports generations and the phases of every recovery. Of any other job only the steps
are known. Each attempt then stands for a generation. Of a recovery only the total is known: from
the strike until the next attempt's first step begins, and until the job has reached its old step
again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

import msgspec

from holdfast.elastic.events import (
    Detected,
    Event,
    FaultInjected,
    GenerationProposed,
    StepDone,
    WorkerStarted,
    of_kind,
)
from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of
from holdfast.tools.chaos.judging.record import Consumed, HookLine, StepCommit, Told, time_of
from holdfast.tools.chaos.judging.result import Struck
from holdfast.tools.report import timeline
from holdfast.tools.report.timeline import Fault, Recovery, Timeline

_NO_NODES: Final = {"launcher", "chaos"}
"""Writers of events that are not nodes."""

_NOT_TOLD: Final = "the durations of its phases are not reported"


def tells_generations(events: Iterable[Told]) -> bool:
    """True if the steps come from a Holdfast job, with generations, seats and durations."""
    return any(isinstance(event, StepDone) for event in events)


def tell(events: Sequence[Told], *, struck: Sequence[Struck] | None = None) -> Timeline | None:
    """Return the timeline of ``events``, by time; None if there are none.

    ``struck`` are the strikes, if they are known from elsewhere; otherwise the faults among the
    events count. A strike has a recovery in the result only if the job had to go back because of
    it.
    """
    generations = tells_generations(events)
    told_faults = of_kind(events, FaultInjected)
    others = [each for each in of_kind(events, Event) if not isinstance(each, FaultInjected)]
    if not generations:
        hooks = [each for each in events if not isinstance(each, Event)]
        others = [*others, *_attempts(hooks, proposed=bool(of_kind(others, GenerationProposed)))]
    if not others:
        return None
    places = _NamedPlaces(others)
    faults = (
        [places.seated(event) for event in told_faults]
        if struck is None
        else [places.fault(each) for each in struck if not each.missed]
    )
    answered = _answered(faults, others)
    story = timeline.build([*others, *answered])
    everything = tuple(_fault(fault, story) for fault in sorted(faults, key=time_of))
    recoveries = story.recoveries if generations else tuple(map(_whole, story.recoveries))
    return msgspec.structs.replace(story, faults=everything, recoveries=recoveries)


def _fault(event: FaultInjected, story: Timeline) -> Fault:
    at_s = event.time_s - story.started_at
    done = (run.step for run in story.steps if run.end_s <= at_s)
    return Fault(
        time_s=at_s,
        kind=event.what,
        victim=event.victim,
        node=event.on,
        step=max(done, default=0),
        seats=event.seats,
    )


def _whole(recovery: Recovery) -> Recovery:
    """Return a recovery whose phases before the first step are unknown."""
    return msgspec.structs.replace(
        recovery,
        detect_s=None,
        agree_s=None,
        reform_s=None,
        restore_s=None,
        note="" if recovery.total_s is None else _NOT_TOLD,
    )


# -- jobs without generations ----------------------------------------------------------------------


def _attempts(reports: Sequence[HookLine], *, proposed: bool) -> list[Event]:
    """Return the steps in hook lines as events of a job whose generations are its attempts.

    A step begins with its samples, or at the end of the rank's previous step. If generations were
    ``proposed``, the attempts are their numbers.
    """
    attempts = sorted({line.attempt for line in reports})
    numbers = {a: a if proposed else n for n, a in enumerate(attempts, 1)}
    signs: dict[tuple[int, int], float] = {}
    begun: dict[tuple[int, int, int], float] = {}
    steps: list[StepDone] = []
    for line in reports:
        rank, number, at_s = line.rank, numbers[line.attempt], line.t
        key = (number, rank, line.step)
        if isinstance(line, Consumed):
            begun[key] = at_s
            signs.setdefault((number, rank), at_s)
        elif isinstance(line, StepCommit):
            start_s = begun.get(key, signs.get((number, rank), at_s))
            signs[number, rank] = at_s
            steps.append(
                StepDone(
                    time_s=at_s,
                    step=line.step,
                    rank=rank,
                    generation=number,
                    seat=_seat(rank),
                    start_s=start_s,
                    seconds=at_s - start_s,
                )
            )
    return [*steps] if proposed else [*steps, *_begins(steps)]


def _begins(steps: Sequence[StepDone]) -> list[GenerationProposed]:
    """Return a proposal for each attempt, at the time of its first report."""
    found: dict[int, list[StepDone]] = defaultdict(list)
    for step in steps:
        found[step.generation].append(step)
    return [
        GenerationProposed(
            time_s=min(step.began_s for step in own),
            generation=number,
            ranks=tuple(_seat(rank) for rank in sorted({step.rank for step in own})),
            restore_step=min(step.step for step in own) - 1,
            reason="the first" if number == 1 else "started again",
        )
        for number, own in found.items()
    ]


def _seat(rank: int) -> str:
    return f"worker/{rank}"


# -- strikes ---------------------------------------------------------------------------------------


class _NamedPlaces:
    """The places of a job's parts, by the names that strikes give them."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._lives = of_kind(events, WorkerStarted)
        self._nodes = {event.node for event in events if event.node} - _NO_NODES

    def fault(self, struck: Struck) -> FaultInjected:
        """Return a strike as the event that a nemesis inside the job writes.

        The end of a part that is no worker is reported under the name of its node or of the part.
        """
        victim = struck.victim.removeprefix("node ")
        node = self._node(victim, struck.t)
        seats: tuple[str, ...] = ()
        if victim == node:
            seats = tuple(sorted(life.seat for life in self._lives if life.node == node))
        elif node and self._is_seat(victim):
            seats = (victim,)
        elif node:
            seats = tuple(name for name in (node, f"{node}/sidecar") if name != victim)
        return FaultInjected(time_s=struck.t, what=struck.kind, victim=victim, on=node, seats=seats)

    def seated(self, event: FaultInjected) -> FaultInjected:
        """Return a nemesis' own event; if it lacks the seats that were hit, add them."""
        found = self.fault(Struck(number=0, kind=event.what, victim=event.victim, t=event.time_s))
        on = found.on or event.on
        changed = event.seats if on else ()
        return msgspec.structs.replace(found, on=on, seats=changed or found.seats)

    def _is_seat(self, name: str) -> bool:
        return any(life.seat == name for life in self._lives)

    def _node(self, victim: str, at_s: float) -> str:
        """Return the node in a victim's name, or the last node of a worker with this name."""
        on = [life.node for life in self._lives if life.seat == victim and life.time_s <= at_s]
        if on:
            return on[-1]
        words = [victim, *re.split(r"[ /]", victim)]
        return next((word for word in words if word in self._nodes), "")


def _answered(faults: Sequence[FaultInjected], events: Sequence[Event]) -> list[FaultInjected]:
    """Return the strikes from which the job had to recover.

    Such a strike is one after which a rank of the generation was reported as ended or under notice.
    Without such a report, it is one after which at most one more step was completed before a
    generation was proposed because of a loss. A strike on a worker that does not train counts once
    its end was reported.
    """
    ends = [(event.time_s, event.step) for event in of_kind(events, StepDone)]
    losses = _losses(events)
    found = []
    for fault in sorted(faults, key=time_of):
        seen = _seen(fault, faults, events)
        if seen and fault.victim in fault.seats and role_of(fault.victim) != TRAINER:
            found.append(fault)
            continue
        since = seen.time_s if seen else fault.time_s
        if (proposed := next((t for t in losses if t >= since), None)) is None:
            continue
        more = {step for end, step in ends if since < end < proposed}
        ranks = _ranks(events, before=fault.time_s)
        noticed = seen is not None and seen.what == "notice"
        ended = seen is not None and bool(ranks & {fault.victim, *fault.seats})
        if noticed or ended or len(more) <= 1:
            found.append(fault)
    return found


def _ranks(events: Sequence[Event], *, before: float) -> set[str]:
    """Return the seats of the newest generation's ranks."""
    proposed = [e for e in of_kind(events, GenerationProposed) if e.time_s <= before]
    newest = max(proposed, key=lambda event: event.generation, default=None)
    return set(newest.ranks) if newest else set()


def _seen(
    fault: FaultInjected, faults: Sequence[FaultInjected], events: Sequence[Event]
) -> Detected | None:
    """Return the event that reports the end of a strike's victim, before it was struck again."""
    names = {fault.victim, *fault.seats}
    again = [f.time_s for f in faults if f.victim == fault.victim and f.time_s > fault.time_s]
    until = min(again, default=inf)
    return next(
        (
            event
            for event in of_kind(events, Detected)
            if event.what != "join"
            and event.victim in names
            and fault.time_s <= event.time_s < until
        ),
        None,
    )


def _losses(events: Sequence[Event]) -> list[float]:
    """Return the times of generations proposed because of a loss: not the first, no join."""
    first: dict[int, float] = {}
    for event in sorted(of_kind(events, GenerationProposed), key=time_of):
        first.setdefault(event.generation, event.time_s)
    joins = [event.time_s for event in of_kind(events, Detected) if event.what == "join"]
    found, before = [], 0.0
    for number in sorted(first):
        at = first[number]
        if number > 1 and not any(before <= join <= at for join in joins):
            found.append(at)
        before = at
    return found
