"""Few agents decide for all nodes of a large job; the others follow. Pure.

An agent that *watches* sees every record of the run, and takes every decision itself. One that
*follows* sees the keys that concern all nodes (`view.job_prefix`) and its own record. In a job of
at most `MOST_WATCHERS` nodes every agent watches. In a larger one the agents that hold a place of
a decider watch, and tell the others in a bulletin what they cannot know: which generation is over,
which is to halt. So a change costs each uninvolved node a few messages, however many nodes there
are.

Why it is safe: only an agent that watches proposes, by the rules of `decisions.agree`, which hold
for any number of proposers. A bulletin can only make a follower fence, or halt at the end of a
step, and only for the generation that it names, whose number is never used again. So two deciders,
none, or a bulletin that comes late cost time and nothing else.

Why it goes on: a decider holds its place under its lease. Every agent sees a place that is free,
and tries to take it after a time that differs from agent to agent. An agent may watch at any time.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from msgspec.structs import replace

from holdfast.elastic.decisions.agree import Decision, FenceWorkers, Halt, Idle, WaitForFences
from holdfast.elastic.membership.readiness import (
    living_deciders,
    member_incarnations,
    newest_stage,
)
from holdfast.elastic.membership.records import (
    TRAINER,
    Bulletin,
    NodeRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView, role_of
from holdfast.elastic.planning.reach import is_wondering

MOST_WATCHERS: Final = 32
"""Number of nodes up to which every agent of a job watches."""

PLACES: Final = 3
"""Number of deciders of a larger job."""

STAGGER_S: Final = 0.05
"""Delay of each next decider's bulletin: mostly the first one's is enough."""

_SPREAD_EACH_S: Final = 0.001
_SPREAD_MOST_S: Final = 1.0


def is_crowd(view: JobView, *, expected: int, most: int = MOST_WATCHERS) -> bool:
    """Return whether the job has deciders: it is large, or was when the first bulletin came.

    ``expected`` is the number of nodes that the job was started with.
    """
    if view.bulletin is not None:
        return True
    return population(view, expected=expected) > most


def population(view: JobView, *, expected: int) -> int:
    """Return the number of nodes of the job, as far as an agent knows that follows."""
    group = view.generation.nodes if view.generation else ()
    return max(expected, len(view.nodes), len(group))


def place_of(view: JobView, incarnation: str) -> int | None:
    """Return the place of a decider that this agent holds, None if it holds none."""
    for place, decider in view.deciders.items():
        if decider.incarnation == incarnation:
            return place
    return None


def turn_of(view: JobView, incarnation: str) -> int | None:
    """Return the number of living deciders before this one, None if it is none."""
    place = place_of(view, incarnation)
    return None if place is None else sum(other < place for other in living_deciders(view))


@dataclass(frozen=True, slots=True, kw_only=True)
class FreePlaces:
    """The times at which an agent first saw that a decider's place is free, by place."""

    since: Mapping[int, float]

    def observe(self, view: JobView, *, now_s: float, places: int = PLACES) -> FreePlaces:
        """Return the updated times; call it with every new view."""
        free = [place for place in range(places) if place not in view.deciders]
        return FreePlaces(since={place: self.since.get(place, now_s) for place in free})


def claim(
    view: JobView, free: FreePlaces, *, node: str, incarnation: str, now_s: float, expected: int
) -> tuple[int | None, float | None]:
    """Return the place that an agent tries to take now (None: none), and when to ask again.

    Each agent waits for a part of a second that its name and the place decide, longer in larger
    jobs: so few of them try before all see the first one's success.
    """
    if not free.since or place_of(view, incarnation) is not None:
        return None, None
    spread_s = min(_SPREAD_EACH_S * population(view, expected=expected), _SPREAD_MOST_S)
    due = {
        place: since_s + spread_s * _fraction(f"{place}/{node}")
        for place, since_s in free.since.items()
    }
    place = min(due, key=lambda each: (due[each], each))
    return (place, None) if now_s >= due[place] else (None, due[place])


def _fraction(text: str) -> float:
    return zlib.crc32(text.encode()) / 2**32


def must_watch(view: JobView, *, own: NodeRecord, leaves: bool, waits: bool) -> str:
    """Return why an agent has to see the records of all nodes itself; empty if it may follow.

    ``view`` may be that of a follower, ``own`` is the node's record. ``leaves``: the node has a
    notice. ``waits``: its trainers have waited too long for others.
    """
    if view.wanted.keys() - {TRAINER}:
        return "workers of other roles look for each other"
    if leaves:
        return "the node has a notice to leave"
    if waits or own.unreachable:
        return "the node is stuck"
    bulletin, generation = view.bulletin, view.generation
    if bulletin is not None and bulletin.look_around:
        return "some node is stuck"
    if generation is None:
        return ""
    if bulletin is not None and bulletin.stage > generation.snapshots.stage:
        return "another stage begins"
    if bulletin is not None and bulletin.over >= generation.number:
        return ""  # it enters the next one as all others do
    if own.node not in generation.nodes:
        return "the node joins"
    inside = member_incarnations(view)
    for worker in own.workers:
        if role_of(worker.seat) != TRAINER or worker.incarnation in inside:
            continue
        if worker.state in (WorkerState.STARTING, WorkerState.READY):
            return f"{worker.seat} joins"
    return ""


def follow(view: JobView, *, own: NodeRecord, stand: bool) -> tuple[Decision, str]:
    """Return the next action of an agent that follows, and the reason.

    ``stand``: the node's trainers have halted at the end of a step, as `Halt` requested.
    """
    if view.outcome:
        return Idle(), "the job has ended"
    if view.generation is None or own.fenced >= view.number:
        return WaitForFences(), "the deciders propose"
    bulletin, number = view.bulletin, view.number
    if bulletin is not None and bulletin.over >= number:
        return FenceWorkers(generation=number), bulletin.reason or "a decider says so"
    if stand and not own.leaving:
        return FenceWorkers(generation=number), "the trainers have halted"
    if bulletin is not None and bulletin.halt == number:
        return Halt(generation=number, until_s=inf), bulletin.reason or "others join"
    return Idle(), f"generation {number} stands"


def tell(view: JobView, *, fencing: int, halting: int, reason: str) -> Bulletin | None:
    """Return the bulletin that a decider should publish, None if all has been told.

    ``fencing`` is the newest generation that its own node fences or has fenced, ``halting`` the one
    whose trainers it halts, for ``reason``. A decider tells all that it does itself.
    """
    before = view.bulletin or Bulletin(number=0)
    said = replace(
        before,
        over=max(before.over, fencing),
        halt=max(before.halt, halting),
        look_around=is_wondering(view),
        stage=newest_stage(view),
    )
    if said == before and view.bulletin is not None:
        return None
    news = (said.over, said.halt) != (before.over, before.halt)
    text = reason if news else before.reason
    return replace(said, number=before.number + 1, reason=text)
