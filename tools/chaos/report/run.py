"""One run as the report shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final, Literal, TypeAlias

import msgspec

from tools.chaos.catalogue import World
from tools.chaos.checker import Verdict
from tools.chaos.record import History
from tools.chaos.report.story import tell, tells_generations
from tools.chaos.result import Result, Struck
from tools.report.timeline import Fault, Recovery, Timeline

Event: TypeAlias = Mapping[str, Any]

Outcome: TypeAlias = Literal["survived", "checkpoint", "refused", "lost"]
"""How it went: on from memory, on from a checkpoint, ended with a clear error as it should, or
not as it should."""

_FROM_STORE: Final = ("checkpoint", "none")
_LOSSES: Final = ("lose", "kill_node")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run, or a history without one; ``unknown`` says in words what it does not tell.

    ``world`` and ``seed`` are None, and ``struck`` is empty, for a history of a job that nobody
    struck by a scenario. ``recoveries`` are those of ``timeline``; ``losses`` the sets of nodes
    that were lost at once, with their memory, and what became of each.
    """

    name: str
    folder: str
    world: World | None
    seed: int | None
    held: bool
    seconds: float
    verdict: Verdict
    struck: tuple[Struck, ...]
    problems: tuple[str, ...]
    replay: str
    recoveries: tuple[Recovery, ...]
    shares: dict[str, float]
    losses: tuple[Loss, ...]
    unknown: tuple[str, ...]
    generations: bool
    timeline: Timeline | None = None

    @property
    def hits(self) -> int:
        """How many strikes hit something."""
        if not self.struck:
            return len(self.timeline.faults) if self.timeline else 0
        return len(self.struck) - self.missed

    @property
    def missed(self) -> int:
        """How many strikes found nothing to hit."""
        return sum(each.missed for each in self.struck)

    @property
    def label(self) -> str:
        """Its name, with what tells it from its like."""
        return self.name if self.seed is None else f"{self.name}, seed {self.seed}"


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that were lost at once, and what became of the job; ``of`` nodes in all."""

    nodes: tuple[str, ...]
    of: int
    outcome: Outcome


def judged(
    events: Sequence[Event],
    history: History,
    verdict: Verdict,
    *,
    folder: str,
    result: Result | None = None,
) -> Run:
    """Return a run from what it told; ``result`` is None for a mere history."""
    story = tell(events, struck=result.struck if result else None)
    generations = tells_generations(events)
    rows = story.recoveries if story else ()
    held = result.held if result else verdict.held
    return Run(
        name=result.name if result else folder,
        folder=folder,
        world=result.world if result else None,
        seed=result.seed if result else None,
        held=held,
        seconds=result.seconds if result else story.wall_s if story else 0.0,
        verdict=verdict,
        struck=result.struck if result else (),
        problems=result.problems if result else (),
        replay=result.replay if result else "",
        recoveries=tuple(row for row in rows if row.total_s is not None),
        shares=story.shares if story else {},
        losses=_losses(story, events, held=held) if story else (),
        generations=generations,
        unknown=_unknown(history, story, generations=generations),
        timeline=story,
    )


def _unknown(history: History, story: Timeline | None, *, generations: bool) -> tuple[str, ...]:
    missing = {
        "any step": not history.commits,
        "generations, and the phases of recoveries": not generations,
        "which samples were trained on": not history.consumed,
        "the state behind the steps": not history.states,
        "what was done to it": story is None or not story.faults,
    }
    return tuple(words for words, absent in missing.items() if absent)


# -- machines that were lost -----------------------------------------------------------------------


def _losses(story: Timeline, events: Sequence[Event], *, held: bool) -> tuple[Loss, ...]:
    """Return the sets of nodes that were gone at once, with their memory.

    A loss is of the same set as the one before if the job had not yet gone on from that.
    """
    over = {
        (row.victim, row.time_s): row.time_s + row.total_s
        for row in story.recoveries
        if row.total_s is not None
    }
    sets: list[list[Fault]] = []
    until_s = 0.0
    for fault in sorted(story.faults, key=lambda each: each.time_s):
        if fault.kind not in _LOSSES or not fault.node:
            continue
        if not sets or fault.time_s > until_s:
            sets.append([])
        sets[-1].append(fault)
        until_s = over.get((fault.victim, fault.time_s), inf)
    nodes = _nodes(events)
    ends_s = [*(own[0].time_s for own in sets[1:]), inf][: len(sets)]
    return tuple(
        Loss(
            nodes=tuple(sorted({fault.node for fault in own})),
            of=len(nodes),
            outcome=_outcome(
                events,
                since=story.started_at + own[0].time_s,
                until=story.started_at + end_s,
                held=held,
            ),
        )
        for own, end_s in zip(sets, ends_s, strict=True)
    )


def _nodes(events: Sequence[Event]) -> list[str]:
    started = next((e for e in events if e["kind"] == "job_started" and "nodes" in e), None)
    if started:
        return list(started["nodes"])
    return sorted({str(event["node"]) for event in events if event["kind"] == "worker_started"})


def _outcome(events: Sequence[Event], *, since: float, until: float, held: bool) -> Outcome:
    """Return what became of the job between two wall times; the job's end tells of the last."""
    if until == inf and not held:
        return "lost"
    ended = next((e for e in reversed(events) if e["kind"] == "job_ended"), {"ok": True})
    if until == inf and not ended.get("ok"):
        return "refused"
    back = (e for e in events if e["kind"] == "restored" and since <= float(e["t"]) < until)
    return "checkpoint" if any(e.get("tier") in _FROM_STORE for e in back) else "survived"
