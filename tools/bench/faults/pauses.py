"""Figures of many recoveries of one kind, and their line in a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from holdfast.elastic.events import Event, StepDone, of_kind
from holdfast.tools.bench.faults.recoveries import PHASES, MeasuredRecovery
from holdfast.tools.bench.samples import Figure

PAUSE: Final = "until all train again"
USEFUL: Final = "until a new step is complete"
LOST: Final = "steps done again"
STEP: Final = "a step takes"
BEYOND: Final = "beyond the threshold"


def figures(
    section: str,
    name: str,
    found: Sequence[MeasuredRecovery],
    *,
    step_s: float,
    versus: Figure | None = None,
) -> list[Figure]:
    """Return the figures of recoveries: the pause, its phases, and the lost steps.

    ``versus`` is the pause with which this one is compared as a ratio.
    """
    pause = sampled(section, f"{name}: {PAUSE}", [each.pause_s for each in found], versus=versus)
    result = [
        pause,
        sampled(section, f"{name}: {USEFUL}", [each.useful_s for each in found]),
        sampled(section, f"{name}: {LOST}", [float(each.lost_steps) for each in found], unit=""),
        sampled(section, f"{name}: {STEP}", [step_s]),
    ]
    for phase in PHASES.values():
        if times := [each.phases()[phase] for each in found if phase in each.phases()]:
            result.append(sampled(section, f"{name}: {phase}", times))
    return result


def sampled(
    section: str,
    name: str,
    samples: Sequence[float],
    *,
    unit: str = "s",
    versus: Figure | None = None,
) -> Figure:
    """Return the median of ``samples`` with its range and 95th percentile."""
    median = statistics.median(samples)
    return Figure(
        section=section,
        name=name,
        value=median,
        unit=unit,
        low=min(samples),
        high=max(samples),
        versus=versus.name if versus else None,
        ratio=median / versus.value if versus else None,
        p95=float(np.percentile(samples, 95)),
        samples=tuple(samples),
    )


def step_s(events: Sequence[Event]) -> float:
    """Return the median duration of a step of the job."""
    return statistics.median(event.time_s - event.began_s for event in of_kind(events, StepDone))


def show(
    figures: Sequence[Figure],
    *,
    console: Console,
    versus: str = "Holdfast's time for a killed worker",
) -> None:
    """Print one line per kind of recovery; ratios are those to the time ``versus`` names."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("n", "median", "min–max", "p95", *PHASES.values(), "new step", "a step", "lost"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("×", justify="right", no_wrap=True)
    lines: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        line, _, what = figure.name.partition(": ")
        lines.setdefault(line, {})[what] = figure
    for line, found in lines.items():
        if PAUSE in found:
            table.add_row(line, *_cells(found))
        if BEYOND in found:
            table.add_row(f"  {BEYOND}", "", *_spread(found[BEYOND]))
    console.print(table)
    console.print(
        "s from the fault (for a planned change: from the last step before it) until all ranks "
        f"train again, and until a new step is complete; ×: multiple of {versus}",
        highlight=False,
    )


def _cells(found: Mapping[str, Figure]) -> list[str]:
    pause = found[PAUSE]
    phases = [_seconds(found[name]) if name in found else "" for name in PHASES.values()]
    return [
        str(len(pause.samples)),
        *_spread(pause),
        *phases,
        _seconds(found[USEFUL]),
        _seconds(found[STEP]),
        f"{found[LOST].high:.0f}",
        "" if pause.ratio is None else f"{pause.ratio:.1f}",
    ]


def _spread(figure: Figure) -> list[str]:
    p95 = "" if figure.p95 is None else f"{figure.p95:.3f}"
    return [_seconds(figure), f"{figure.low:.3f}–{figure.high:.3f}", p95]


def _seconds(figure: Figure) -> str:
    return f"{figure.value:.3f}"
