"""A job's history as values, and the part of it that survived the restarts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import TypeAlias

import msgspec

from holdfast.elastic.events import Event

Execution: TypeAlias = tuple[int, int]
"""(attempt, step): a step that at least one rank completed."""


class StepCommit(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """Report that a rank completed a step, at wall-clock second ``t``."""

    t: float
    step: int
    rank: int
    attempt: int


class Consumed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="samples"):
    """Report that a rank trains on samples in a step; an id names one sample of an epoch."""

    t: float
    step: int
    rank: int
    attempt: int
    epoch: int
    ids: tuple[int | str, ...]


class Stated(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="state"):
    """Digest of a rank's state after a step."""

    t: float
    step: int
    rank: int
    attempt: int
    digest: str


HookLine: TypeAlias = StepCommit | Consumed | Stated
"""A line that a hook wrote (`holdfast.tools.chaos.hooks`)."""

Told: TypeAlias = Event | HookLine
"""A report of a job: an event of a Holdfast job, or a line of any loop's hooks."""


def time_of(line: Told) -> float:
    """Return the time of a report, in wall-clock seconds."""
    return line.time_s if isinstance(line, Event) else line.t


class History(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All reports, ordered by time.

    A restart continues from an earlier step; the work of the attempt before it from there on is
    undone. A step *survives* if no later attempt completed that step, or an earlier one, again.
    """

    commits: tuple[StepCommit, ...]
    consumed: tuple[Consumed, ...] = ()
    states: tuple[Stated, ...] = ()

    @cached_property
    def ranks(self) -> Mapping[Execution, frozenset[int]]:
        """The ranks that completed each execution."""
        found: dict[Execution, set[int]] = defaultdict(set)
        for commit in self.commits:
            found[commit.attempt, commit.step].add(commit.rank)
        return {execution: frozenset(ranks) for execution, ranks in found.items()}

    @cached_property
    def surviving(self) -> Mapping[int, int]:
        """The attempt whose execution of each step survives, by step."""
        firsts: dict[int, int] = {}
        for attempt, step in self.ranks:
            firsts[attempt] = min(step, firsts.get(attempt, step))
        found: dict[int, int] = {}
        cut: int | None = None
        for attempt in sorted(firsts, reverse=True):
            steps = [s for a, s in self.ranks if a == attempt and (cut is None or s < cut)]
            found.update(dict.fromkeys(steps, attempt))
            cut = firsts[attempt] if cut is None else min(cut, firsts[attempt])
        return dict(sorted(found.items()))

    @cached_property
    def undone(self) -> Mapping[int, tuple[int, ...]]:
        """The steps that were executed and undone, by the attempt that had completed them."""
        found: dict[int, list[int]] = defaultdict(list)
        for attempt, step in sorted(self.ranks):
            if self.surviving.get(step) != attempt:
                found[attempt].append(step)
        return {attempt: tuple(steps) for attempt, steps in found.items()}

    def survives(self, line: StepCommit | Consumed | Stated) -> bool:
        """True if a report belongs to a surviving execution."""
        return self.surviving.get(line.step) == line.attempt
