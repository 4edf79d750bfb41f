"""Totals of many runs: recoveries by fault and phase, time, machines lost. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final

import msgspec

from holdfast.tools.chaos.report.losses import OUTCOMES, Loss, Outcome
from holdfast.tools.chaos.report.run import ReportedRun
from holdfast.tools.report import accounting
from holdfast.tools.report.timeline import PHASES, Recovery

TOTAL: Final = "total_s"
ALL: Final = "all"
"""The class of faults that contains all of them."""

_WORST_FIRST: Final[tuple[Outcome, ...]] = tuple(reversed(OUTCOMES))
_MOST_SUBSETS: Final = 512


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one phase over ``count`` recoveries; the percentiles interpolate linearly."""

    count: int
    p50_s: float
    p95_s: float
    most_s: float


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """Recoveries from one class of faults: each reported phase, and the total."""

    fault: str
    count: int
    steps_lost: int
    phases: dict[str, Spread]
    samples_s: tuple[float, ...]

    @property
    def total(self) -> Spread:
        """Spread of the whole recoveries."""
        return self.phases[TOTAL]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A set of nodes: the number of its losses at once, and the worst outcome.

    ``outcome`` is None for a set that was never lost, ``predicted`` is None without a prediction;
    of several predictions it is the worst.
    """

    nodes: tuple[str, ...]
    count: int
    outcome: Outcome | None
    predicted: Outcome | None = None

    @property
    def differs(self) -> bool:
        """True if the outcome is not the predicted one."""
        return self.predicted is not None and self.outcome not in (None, self.predicted)


class RunsSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of runs.

    ``strikes`` counts those that hit something; ``shares`` are seconds by class of time, over all
    runs. ``repairs`` has the class `ALL` first. ``broken`` counts the runs that break each check.
    ``survival`` has a row of cells for each number of nodes lost at once.
    """

    runs: int
    held: int
    strikes: int
    missed: int
    executed: int
    undone: int
    undone_most: int
    shares: dict[str, float]
    goodput: float
    repairs: tuple[Repair, ...]
    broken: dict[str, int]
    survival: dict[int, tuple[Cell, ...]]


def summarise(runs: Sequence[ReportedRun]) -> RunsSummary:
    """Return the totals of runs; raises ``ValueError`` if there are none."""
    if not runs:
        raise ValueError("no runs")
    shares: Counter[str] = Counter()
    for run in runs:
        shares.update(run.shares)
    broken = Counter(name for run in runs for name in {v.check for v in run.verdict.violations})
    return RunsSummary(
        runs=len(runs),
        held=sum(run.held for run in runs),
        strikes=sum(run.hits for run in runs),
        missed=sum(run.missed for run in runs),
        executed=sum(run.verdict.executed for run in runs),
        undone=sum(run.verdict.undone for run in runs),
        undone_most=max(run.verdict.undone_most for run in runs),
        shares=dict(shares),
        goodput=accounting.useful(shares),
        repairs=_repairs([row for run in runs for row in run.recoveries]),
        broken=dict(broken.most_common()),
        survival=survival([loss for run in runs for loss in run.losses]),
    )


def _repairs(rows: Sequence[Recovery]) -> tuple[Repair, ...]:
    by_fault: dict[str, list[Recovery]] = defaultdict(list)
    for row in rows:
        by_fault[row.kind].append(row)
    classes = {ALL: list(rows), **dict(sorted(by_fault.items()))} if rows else {}
    return tuple(_repair(fault, found) for fault, found in classes.items())


def _repair(fault: str, rows: Sequence[Recovery]) -> Repair:
    columns = {phase: _column(rows, phase) for phase in PHASES}
    totals = _column(rows, TOTAL)
    return Repair(
        fault=fault,
        count=len(rows),
        steps_lost=sum(row.steps_lost for row in rows),
        phases={
            **{phase: _spread(values) for phase, values in columns.items() if values},
            TOTAL: _spread(totals),
        },
        samples_s=tuple(totals),
    )


def _column(rows: Iterable[Recovery], phase: str) -> list[float]:
    """Return the durations of a phase in order, without recoveries that lack it."""
    return sorted(value for row in rows if (value := getattr(row, phase)) is not None)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(
        count=len(values),
        p50_s=percentile(values, 0.5),
        p95_s=percentile(values, 0.95),
        most_s=values[-1],
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return the value below which ``part`` of the ordered values lie, interpolated linearly."""
    at = part * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def survival(losses: Sequence[Loss]) -> dict[int, tuple[Cell, ...]]:
    """Return the matrix of sets of nodes: by number of nodes lost at once, each with its outcome.

    It contains all sets of a size that occurred, also those that were never lost, as long as there
    are few enough to show.
    """
    found: dict[tuple[str, ...], list[Loss]] = defaultdict(list)
    for loss in losses:
        found[loss.nodes].append(loss)
    names = sorted({name for nodes in found for name in nodes})
    return {
        size: tuple(_cell(nodes, found.get(nodes, ())) for nodes in _sets(names, size, found))
        for size in sorted({len(nodes) for nodes in found})
    }


def _sets(
    names: Sequence[str], size: int, found: Mapping[tuple[str, ...], object]
) -> list[tuple[str, ...]]:
    every = []
    for nodes in combinations(names, size):
        every.append(nodes)
        if len(every) > _MOST_SUBSETS:
            return sorted(nodes for nodes in found if len(nodes) == size)
    return every


def _cell(nodes: tuple[str, ...], losses: Sequence[Loss]) -> Cell:
    return Cell(
        nodes=nodes,
        count=len(losses),
        outcome=_worst({loss.outcome for loss in losses}),
        predicted=_worst({loss.predicted for loss in losses}),
    )


def _worst(outcomes: Collection[Outcome | None]) -> Outcome | None:
    return next((each for each in _WORST_FIRST if each in outcomes), None)


# -- comparison ------------------------------------------------------------------------------------


class FigureDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two sets of runs, None if a set does not have it. ``unit`` is "s", "%" or "".

    ``better`` names the better side, "" if neither is better by enough.
    """

    name: str
    unit: str
    before: float | None
    after: float | None
    better: str


def compare(
    before: Sequence[ReportedRun], after: Sequence[ReportedRun]
) -> tuple[FigureDifference, ...]:
    """Return the differences between two sets of runs, figure by figure."""
    old, new = summarise(before), summarise(after)
    pairs: list[tuple[str, str, float | None, float | None, bool | None]] = [
        ("runs", "", old.runs, new.runs, None),
        ("recoveries", "", _recoveries(old), _recoveries(new), None),
        ("runs that held", "%", old.held / old.runs, new.held / new.runs, True),
        ("goodput", "%", _goodput(old), _goodput(new), True),
        ("steps undone, of those executed", "%", _undone(old), _undone(new), False),
        ("most steps undone by one restart", "", old.undone_most, new.undone_most, False),
    ]
    theirs = {repair.fault: repair for repair in old.repairs}
    ours = {repair.fault: repair for repair in new.repairs}
    for fault in dict.fromkeys([*theirs, *ours]):
        for phase in (TOTAL, *PHASES) if fault == ALL else (TOTAL,):
            name = f"{'recovery' if phase == TOTAL else phase.removesuffix('_s')}, {fault}"
            sides = [repairs.get(fault) for repairs in (theirs, ours)]
            for title, pick in (("p50", "p50_s"), ("p95", "p95_s")):
                values = [
                    getattr(each.phases[phase], pick) if each and phase in each.phases else None
                    for each in sides
                ]
                if values != [None, None]:
                    pairs.append((f"{name}: {title}", "s", values[0], values[1], False))
    return tuple(
        FigureDifference(name=name, unit=unit, before=a, after=b, better=_better(a, b, more=more))
        for name, unit, a, b, more in pairs
    )


def _recoveries(summary: RunsSummary) -> int:
    return summary.repairs[0].count if summary.repairs else 0


def _goodput(summary: RunsSummary) -> float | None:
    return summary.goodput if summary.shares else None


def _undone(summary: RunsSummary) -> float | None:
    return summary.undone / summary.executed if summary.executed else None


def _better(before: float | None, after: float | None, *, more: bool | None) -> str:
    """Return "before", "after", or "" if they differ by no more than a tenth of the larger.

    ``more`` says whether a larger figure is better; None: neither side can be better.
    """
    if before is None or after is None or more is None:
        return ""
    if abs(after - before) <= 0.1 * max(abs(before), abs(after)):
        return ""
    return "after" if (after > before) == more else "before"
