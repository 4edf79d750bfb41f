"""Section goodput: the share of useful steps in the time while workers are killed.

A job of four workers trains for some minutes, and every minute one of them is killed. Every second
between the first step and the last belongs to one class.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Final

from rich.console import Console
from rich.table import Table

from holdfast.elastic.events import Event, FaultInjected, StepDone, of_kind
from holdfast.tools.bench.faults import pauses
from holdfast.tools.bench.faults.elastic_job import WORKERS, Shape, elastic_job
from holdfast.tools.bench.faults.recoveries import MeasuredRecovery, after_fault
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo
from holdfast.tools.report import accounting, timeline

FAULT_EVERY_S: Final = 60.0
_QUICK_FAULT_EVERY_S: Final = 6.0
_FAULTS: Final = 5
_QUICK_FAULTS: Final = 1

USEFUL: Final = "time in useful steps"
RATE: Final = "steps, beside as many as undisturbed"
FAULT: Final = "a worker killed, going on smaller"
JOIN: Final = "its replacement joins"


def goodput(setup: BenchSetup) -> list[Figure]:
    """Train for ``setup.minutes`` with a fault at regular intervals, and account for the time."""
    every_s = _QUICK_FAULT_EVERY_S if setup.quick else FAULT_EVERY_S
    faults = _QUICK_FAULTS if setup.quick else _FAULTS
    if setup.minutes is not None:
        faults = max(round(setup.minutes * 60 / every_s), 1)
    lost, joined = [], []
    with (
        Tempo(setup, total=faults) as tempo,
        elastic_job(setup, "goodput", Shape()) as job,
    ):
        began_s = time.monotonic()
        for number in range(faults):
            tempo.say(f"fault {number + 1} of {faults}, one every {every_s:g} s")
            _sleep_until(began_s + every_s * (number + 0.5))
            job.log.read()
            seat = job.ranks()[number % WORKERS]
            killed_s = job.kill(seat)
            lost.append(
                job.log.until(partial(after_fault, killed_s=killed_s), f"going on without {seat}")
            )
            joined.append(job.joined(since_s=killed_s, what=f"another {seat}"))
            tempo.beat()
        _sleep_until(began_s + every_s * faults)
        job.end()
        events = job.log.events
    return [*_shares(events), *_steps(events), *_pauses(events, lost, joined)]


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))


def _shares(events: Sequence[Event]) -> list[Figure]:
    """Return the share of every class in the time from the first step to the last."""
    story = timeline.build(events)
    inside = accounting.within(story.shares)
    whole_s = sum(inside.values())
    useful = _one(USEFUL, accounting.useful(story.shares), "")
    wasted = [
        _one(f"lost: {name}", s / whole_s, "")
        for name, s in inside.items()
        if name != "productive" and s > 0
    ]
    return [useful, *wasted, _one("time accounted for", whole_s, "s")]


def _steps(events: Sequence[Event]) -> list[Figure]:
    """Return the number of steps as a share of those an undisturbed job would have done.

    Fewer ranks also take longer for a step, and all ranks do while another starts on their cores.
    """
    ends: dict[int, float] = {}
    for event in of_kind(events, StepDone):
        ends[event.step] = max(ends.get(event.step, 0.0), event.time_s)
    first = of_kind(events, FaultInjected)[0].time_s
    before = sorted(t for t in ends.values() if t < first)
    period_s = statistics.median(b - a for a, b in pairwise(before))
    span_s = max(ends.values()) - min(ends.values())
    return [
        _one(RATE, (len(ends) - 1) * period_s / span_s, ""),
        _one("a step undisturbed", period_s, "s"),
    ]


def _pauses(
    events: Sequence[Event], lost: Sequence[MeasuredRecovery], joined: Sequence[MeasuredRecovery]
) -> list[Figure]:
    step_s = pauses.step_s(events)
    return [
        *pauses.figures("goodput", FAULT, lost, step_s=step_s),
        *pauses.figures("goodput", JOIN, joined, step_s=step_s),
    ]


def _one(name: str, value: float, unit: str) -> Figure:
    return Figure(section="goodput", name=name, value=value, unit=unit, low=value, high=value)


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print the shares of the time, and the pauses that cause the losses."""
    lines = (FAULT, JOIN)
    of_pauses = [each for each in figures if each.name.partition(": ")[0] in lines]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for figure in figures:
        if figure not in of_pauses:
            shown = f"{figure.value:.2f} s" if figure.unit == "s" else f"{figure.value:.2%}"
            table.add_row(figure.name, shown)
    console.print(table)
    pauses.show(of_pauses, console=console)
