"""Measures of a reinforcement learning job over an interval, read from its events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from holdfast.elastic.events import (
    Event,
    MetricsLogged,
    RolloutRecovered,
    RolloutsAwaited,
    StepDone,
    TokensSampled,
    of_kind,
)

SKIPPED_STEPS: Final = 3
"""Number of first steps that are not counted: the pipeline fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPace:
    """Training from the end of one step to the end of the last.

    ``waited`` is the share of the time in which the trainer waited for rollouts.
    """

    steps: int
    seconds: float
    tokens: int
    waited: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Totals of what all rollout workers sampled and wrote to their logs.

    ``share`` is the time they spent on their logs, as a share of that and of sampling.
    """

    tokens: int
    nbytes: int
    share: float


def pace(events: Sequence[Event], *, skipped: int = SKIPPED_STEPS) -> StepPace:
    """Return the pace of training. Raises ``ValueError`` if there were too few steps."""
    ends = {event.step: event.time_s for event in of_kind(events, StepDone) if event.rank == 0}
    tokens = {
        event.step: int(event.values["tokens"] or 0) for event in of_kind(events, MetricsLogged)
    }
    if len(ends) <= skipped:
        raise ValueError(
            f"{len(ends)} steps were completed, and the measurement needs more than {skipped}"
        )
    steps = sorted(ends)
    first, *counted = steps[skipped - 1 :]
    seconds = ends[counted[-1]] - ends[first]
    waited = sum(
        event.seconds
        for event in of_kind(events, RolloutsAwaited)
        if first < event.step <= counted[-1]
    )
    return StepPace(
        steps=len(counted),
        seconds=seconds,
        tokens=sum(tokens[step] for step in counted),
        waited=waited / seconds,
    )


def logged(events: Sequence[Event]) -> Logged:
    """Return the totals of all workers; of lost workers, up to their last report."""
    lasts = [report[-1] for report in _reports(events)]
    logging_s = sum(event.logging_s for event in lasts)
    sampling_s = sum(event.sampling_s for event in lasts)
    return Logged(
        tokens=sum(event.tokens for event in lasts),
        nbytes=sum(event.logged_bytes for event in lasts),
        share=logging_s / (logging_s + sampling_s) if lasts else 0.0,
    )


def sampled(events: Sequence[Event], *, since_s: float, until_s: float) -> float:
    """Return the number of tokens sampled between two times, from the workers' reports."""
    return sum(
        (later.tokens - sooner.tokens) * _overlap(sooner.time_s, later.time_s, since_s, until_s)
        for group in _reports(events)
        for sooner, later in pairwise(group)
    )


def handed_on(events: Sequence[Event], *, seat: str, since_s: float) -> RolloutRecovered | None:
    """Return the recovery of the work of a worker lost after ``since_s``, None if there is none.

    The event has the ``tokens`` that were saved, and those to be sampled again (``resampled``).
    """
    found = (
        event
        for event in of_kind(events, RolloutRecovered)
        if event.worker == seat and event.time_s >= since_s
    )
    return next(found, None)


def _reports(events: Sequence[Event]) -> Iterator[list[TokensSampled]]:
    """Yield the reports of each worker process, in order."""
    seats: dict[str, list[list[TokensSampled]]] = defaultdict(list)
    for event in of_kind(events, TokensSampled):
        of_seat = seats[event.seat]
        if not of_seat or event.tokens < of_seat[-1][-1].tokens:
            of_seat.append([])  # a new process counts from zero
        of_seat[-1].append(event)
    for of_seat in seats.values():
        yield from of_seat


def _overlap(begin_s: float, end_s: float, since_s: float, until_s: float) -> float:
    """Return the share of the first interval that lies in the second."""
    if end_s <= begin_s:
        return 0.0
    return max(0.0, min(end_s, until_s) - max(begin_s, since_s)) / (end_s - begin_s)
