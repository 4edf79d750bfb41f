"""Section join: the pause of training when a worker joins, prepared and not prepared.

Four workers train, each on a node that shares no memory with the others, as if on its own host. One
is killed. Its replacement starts while the others train on, and the pause of its join is timed.
Every byte of the state changes in every step, so prefetched bytes help only if they are kept
current.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from rich.console import Console

from holdfast.elastic.events import WorkerRehearsed, of_kind
from holdfast.tools.bench.faults import pauses
from holdfast.tools.bench.faults.elastic_job import WORKERS, Shape, elastic_job
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo

PREPARED: Final = "rehearsed and prefetched"
COLD: Final = "not prepared"
SENT: Final = "sent between hosts in the pause"
REHEARSAL: Final = "rehearsal, while the others train"


def join(setup: BenchSetup) -> list[Figure]:
    """Time joins, prepared and not."""
    with Tempo(setup, total=2 * setup.repeat) as tempo:
        return [figure for name in (PREPARED, COLD) for figure in _joins(setup, name, tempo)]


def _joins(setup: BenchSetup, name: str, tempo: Tempo) -> list[Figure]:
    found = []
    shape = Shape(nodes=WORKERS, apart=True, rehearse=name == PREPARED)
    with elastic_job(setup, name.replace(" ", "-"), shape) as job:
        for number in range(setup.repeat):
            tempo.say(f"{name}, {number + 1} of {setup.repeat}")
            seat = job.ranks()[number % WORKERS]
            killed_s = job.kill(seat)
            found.append(job.joined(since_s=killed_s, what=f"another {seat}"))
            tempo.beat()
        events = job.log.events
    sent = [each.sent_bytes / (1 << 20) for each in found]
    figures = pauses.figures("join", name, found, step_s=pauses.step_s(events))
    figures.append(pauses.sampled("join", f"{name}: {SENT}", sent, unit="MiB"))
    if took := [event.seconds for event in of_kind(events, WorkerRehearsed)]:
        figures.append(pauses.sampled("join", f"{name}: {REHEARSAL}", took))
    return figures


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line per kind of join, and the bytes sent between hosts."""
    pauses.show(figures, console=console)
    for figure in figures:
        if figure.name.endswith((SENT, REHEARSAL)):
            value = statistics.median(figure.samples)
            console.print(f"{figure.name}: {value:.2f} {figure.unit}", highlight=False)
