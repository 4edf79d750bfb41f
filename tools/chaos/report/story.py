"""From what a job told, and what was done to it, to the timeline of the report. Pure.

A job of Holdfast tells generations and the phases of every recovery. Of any other only its steps
are known: each attempt stands for a generation, and of a recovery how long it took in all, from the
strike until the next attempt's first step began, and until it stood where it had stood.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of
from holdfast.tools.chaos.judging.result import Struck
from holdfast.tools.report import timeline
from holdfast.tools.report.timeline import Fault, Recovery, Timeline

Event: TypeAlias = Mapping[str, Any]

_HOOKS: Final = ("step", "samples", "state")
_NO_NODES: Final = {"launcher", "chaos"}
"""Writers of events that are no node."""

_NOT_TOLD: Final = "how long its phases took is not told"


def tells_generations(events: Iterable[Event]) -> bool:
    """Whether the steps are those of a job of Holdfast, with generations, seats and durations."""
    return any(event["kind"] == "step" and "seconds" in event for event in events)


def tell(events: Sequence[Event], *, struck: Sequence[Struck] | None = None) -> Timeline | None:
    """Return the story of ``events``, by time; None without any.

    ``struck`` is what was done to the job, where that is known from elsewhere; else the faults
    among the events count. A strike has a recovery in the result only if the job had to go back
    because of it.
    """
    generations = tells_generations(events)
    plain = [event for event in events if _is_hook(event)]
    others = [event for event in events if not _is_hook(event) and event["kind"] != "fault"]
    if not generations:
        others = [*others, *_attempts(plain, proposed=_are_proposed(others))]
    if not others:
        return None
    places = _NamedPlaces(others)
    faults = (
        [places.seated(event) for event in events if event["kind"] == "fault"]
        if struck is None
        else [places.fault(each) for each in struck if not each.missed]
    )
    answered = _answered(faults, others)
    story = timeline.build([*others, *answered])
    everything = tuple(_fault(fault, story) for fault in sorted(faults, key=_time))
    recoveries = story.recoveries if generations else tuple(map(_whole, story.recoveries))
    return msgspec.structs.replace(story, faults=everything, recoveries=recoveries)


def _is_hook(event: Event) -> bool:
    return event["kind"] in _HOOKS and "attempt" in event


def _time(event: Event) -> float:
    return float(event["t"])


def _fault(event: Event, story: Timeline) -> Fault:
    at_s = float(event["t"]) - story.started_at
    done = (run.step for run in story.steps if run.end_s <= at_s)
    return Fault(
        time_s=at_s,
        kind=event["what"],
        victim=event["victim"],
        node=event["on"],
        step=max(done, default=0),
        seats=tuple(event["seats"]),
    )


def _whole(recovery: Recovery) -> Recovery:
    """Return a recovery whose phases before the first step are not told apart."""
    return msgspec.structs.replace(
        recovery,
        detect_s=None,
        agree_s=None,
        reform_s=None,
        restore_s=None,
        note="" if recovery.total_s is None else _NOT_TOLD,
    )


# -- jobs without generations ----------------------------------------------------------------------


def _are_proposed(events: Iterable[Event]) -> bool:
    """Whether generations are told, though no steps of theirs are: so does a simulated job."""
    return any(event["kind"] == "proposed" for event in events)


def _attempts(told: Sequence[Event], *, proposed: bool) -> list[Event]:
    """Return the steps that hooks told as events of a job whose generations are its attempts.

    A step begins with its samples, or where the rank's step before ended. Generations that were
    ``proposed`` are the attempts themselves.
    """
    attempts = sorted({event["attempt"] for event in told})
    numbers = {a: a if proposed else n for n, a in enumerate(attempts, 1)}
    signs: dict[tuple[int, int], float] = {}
    begun: dict[tuple[int, int, int], float] = {}
    steps: list[Event] = []
    for event in told:
        rank, number, at = event["rank"], numbers[event["attempt"]], float(event["t"])
        key = (number, rank, event["step"])
        if event["kind"] == "samples":
            begun[key] = at
            signs.setdefault((number, rank), at)
        elif event["kind"] == "step":
            start = begun.get(key, signs.get((number, rank), at))
            signs[number, rank] = at
            fields = {"step": event["step"], "rank": rank, "generation": number}
            fields["seat"] = f"worker/{rank}"
            steps.append({"t": at, "kind": "step", **fields, "start": start, "seconds": at - start})
    return steps if proposed else [*steps, *_begins(steps)]


def _begins(steps: Sequence[Event]) -> list[Event]:
    """Return a proposal for each attempt, at the first sign of it."""
    found: dict[int, list[Event]] = defaultdict(list)
    for step in steps:
        found[step["generation"]].append(step)
    return [
        {
            "t": min(step["start"] for step in own),
            "kind": "proposed",
            "generation": number,
            "ranks": len({step["rank"] for step in own}),
            "restore_step": min(step["step"] for step in own) - 1,
            "reason": "the first" if number == 1 else "started again",
        }
        for number, own in found.items()
    ]


# -- strikes ---------------------------------------------------------------------------------------


class _NamedPlaces:
    """Where the parts of a job are, by the names that strikes give them."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._lives = [event for event in events if event["kind"] == "worker_started"]
        self._nodes = {event["node"] for event in events if event.get("node")} - _NO_NODES

    def fault(self, struck: Struck) -> Event:
        """Return a strike as the event that a nemesis inside the job writes.

        What is no worker is seen to end by the name of its node, or of its part of it.
        """
        victim = struck.victim.removeprefix("node ")
        node = self._node(victim, struck.t)
        seats: tuple[str, ...] = ()
        if victim == node:
            seats = tuple(sorted(e["seat"] for e in self._lives if e["node"] == node))
        elif node and self._is_seat(victim):
            seats = (victim,)
        elif node:
            seats = tuple(name for name in (node, f"{node}/sidecar") if name != victim)
        return {
            "t": struck.t,
            "kind": "fault",
            "what": struck.kind,
            "victim": victim,
            "on": node,
            "seats": seats,
        }

    def seated(self, event: Event) -> Event:
        """Return a nemesis' own event with the seats that were hit, where it does not tell them."""
        found = self.fault(
            Struck(number=0, kind=event["what"], victim=event["victim"], t=event["t"])
        )
        on = found["on"] or event.get("on", "")
        told = event.get("seats") if on else ()
        return {**found, "on": on, "seats": told or found["seats"]}

    def _is_seat(self, name: str) -> bool:
        return any(event["seat"] == name for event in self._lives)

    def _node(self, victim: str, at: float) -> str:
        """Return the node that a name is of, or that a worker of this name was on last."""
        on = [e["node"] for e in self._lives if e["seat"] == victim and float(e["t"]) <= at]
        if on:
            return str(on[-1])
        words = [victim, *re.split(r"[ /]", victim)]
        return next((word for word in words if word in self._nodes), "")


def _answered(faults: Sequence[Event], events: Sequence[Event]) -> list[Event]:
    """Return the strikes that the job had to recover from.

    A rank of the generation was seen to end, or to have notice. Where that is not told: behind such
    a strike, or behind the moment it was seen, no more than one step is complete before the next
    generation is proposed because of a loss. A worker that does not train is recovered from once it
    was seen to end.
    """
    ends = [(_time(event), event["step"]) for event in events if event["kind"] == "step"]
    losses = _losses(events)
    found = []
    for fault in sorted(faults, key=_time):
        seen = _seen(fault, faults, events)
        if seen and fault["victim"] in fault["seats"] and role_of(fault["victim"]) != TRAINER:
            found.append(fault)
            continue
        since = _time(seen) if seen else _time(fault)
        if (proposed := next((t for t in losses if t >= since), None)) is None:
            continue
        more = {step for end, step in ends if since < end < proposed}
        ranks = _ranks(events, before=_time(fault))
        noticed = seen is not None and seen.get("what") == "notice"
        ended = seen is not None and bool(ranks & {fault["victim"], *fault["seats"]})
        if noticed or ended or len(more) <= 1:
            found.append(fault)
    return found


def _ranks(events: Sequence[Event], *, before: float) -> set[str]:
    """Return the seats of the newest generation's ranks, where they are told."""
    proposed = [e for e in events if e["kind"] == "proposed" and _time(e) <= before]
    newest = max(proposed, key=lambda event: int(event["generation"]), default=None)
    ranks = newest.get("ranks", ()) if newest else ()
    return set(ranks) if isinstance(ranks, list | tuple) else set()


def _seen(fault: Event, faults: Sequence[Event], events: Sequence[Event]) -> Event | None:
    """Return the event that says that a strike's victim ended, before it was struck again."""
    names = {fault["victim"], *fault["seats"]}
    again = [_time(f) for f in faults if f["victim"] == fault["victim"] and _time(f) > _time(fault)]
    until = min(again, default=inf)
    return next(
        (
            event
            for event in events
            if event["kind"] == "detected"
            and event.get("what") != "join"
            and event.get("victim") in names
            and _time(fault) <= _time(event) < until
        ),
        None,
    )


def _losses(events: Sequence[Event]) -> list[float]:
    """Return when generations were proposed because of a loss: not the first, no joiner."""
    first: dict[int, float] = {}
    for event in sorted(events, key=_time):
        if event["kind"] == "proposed":
            first.setdefault(event["generation"], _time(event))
    joins = [_time(e) for e in events if e["kind"] == "detected" and e.get("what") == "join"]
    found, before = [], 0.0
    for number in sorted(first):
        at = first[number]
        if number > 1 and not any(before <= join <= at for join in joins):
            found.append(at)
        before = at
    return found
