"""Machines that were lost at once, and the outcome for the job. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.elastic.events import JobEnded, JobStarted, StateRestored, WorkerStarted, of_kind
from holdfast.tools.chaos.judging.record import Told
from holdfast.tools.report.timeline import Fault, Timeline

Outcome: TypeAlias = Literal["memory", "parity", "checkpoint", "beginning", "refused", "lost"]
"""The outcome for a job that lost machines; `OUTCOMES` says it in words."""

OUTCOMES: Final[dict[Outcome, str]] = {
    "memory": "went on from memory",
    "parity": "went on from parity",
    "checkpoint": "went on from a checkpoint",
    "beginning": "lost its work and began again",
    "refused": "ended with a clear error, as it should",
    "lost": "did not hold",
}
"""Outcomes in words, the best first."""

_OF_TIER: Final[dict[str, Outcome]] = {
    "parity": "parity",
    "checkpoint": "checkpoint",
    "none": "beginning",
}
_LOSSES: Final = ("lose", "kill_node")


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that were lost at once, out of ``of``, and the outcome for the job.

    ``predicted`` is the predicted outcome, if there is a prediction.
    """

    nodes: tuple[str, ...]
    of: int
    outcome: Outcome
    predicted: Outcome | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted outcome for a job of ``of`` nodes with ``parity`` that loses ``nodes``."""

    nodes: tuple[str, ...]
    of: int
    parity: int
    outcome: Outcome


def losses(
    story: Timeline,
    events: Sequence[Told],
    *,
    held: bool,
    prediction: Prediction | None = None,
) -> tuple[Loss, ...]:
    """Return the sets of nodes that were lost at once, with their memory.

    A loss belongs to the same set as the one before if the job had not yet recovered from that.
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
    of = len(_nodes(events))
    ends_s = [*(own[0].time_s for own in sets[1:]), inf][: len(sets)]
    found = []
    for own, end_s in zip(sets, ends_s, strict=True):
        nodes = tuple(sorted({fault.node for fault in own}))
        outcome = _outcome(
            events,
            since=story.started_at + own[0].time_s,
            until=story.started_at + end_s,
            held=held,
        )
        meant = prediction is not None and prediction.nodes == nodes
        predicted = prediction.outcome if prediction and meant else None
        found.append(Loss(nodes=nodes, of=of, outcome=outcome, predicted=predicted))
    return tuple(found)


def _nodes(events: Sequence[Told]) -> list[str]:
    for started in of_kind(events, JobStarted):
        if started.nodes:
            return list(started.nodes)
    return sorted({event.node for event in of_kind(events, WorkerStarted)})


def _outcome(events: Sequence[Told], *, since: float, until: float, held: bool) -> Outcome:
    """Return the outcome between two wall-clock times; for the last loss the job's end decides."""
    if until == inf and not held:
        return "lost"
    ended = of_kind(events, JobEnded)
    if until == inf and ended and not ended[-1].ok:
        return "refused"
    back = (e for e in of_kind(events, StateRestored) if since <= e.time_s < until)
    found = [_OF_TIER.get(event.tier, "memory") for event in back]
    return max(found, key=tuple(OUTCOMES).index, default="memory")
