"""Section resize: the pause of training when a node leaves on notice, and when it joins.

A job of four nodes runs; one of them gets notice that it will be taken away, leaves, and comes
back.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from holdfast.tools.bench.faults import pauses
from holdfast.tools.bench.faults.elastic_job import WORKERS, Shape, elastic_job
from holdfast.tools.bench.faults.recoveries import MeasuredRecovery
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo


def resize(setup: BenchSetup) -> list[Figure]:
    """Go from four ranks to three and back, repeatedly."""
    times = setup.repeat * (1 if setup.quick else 2)
    with Tempo(setup, total=times) as tempo:
        left, joined, step_s = there_and_back(setup, times, tempo=tempo)
    return [
        *pauses.figures("resize", f"{WORKERS} → {WORKERS - 1}", left, step_s=step_s),
        *pauses.figures("resize", f"{WORKERS - 1} → {WORKERS}", joined, step_s=step_s),
    ]


def there_and_back(
    setup: BenchSetup, times: int, *, tempo: Tempo
) -> tuple[list[MeasuredRecovery], list[MeasuredRecovery], float]:
    """Return the recoveries after leaving and after joining, and the duration of a step."""
    left, joined = [], []
    with elastic_job(setup, "resized", Shape(nodes=WORKERS, parity=1)) as job:
        for number in range(times):
            tempo.say(f"a node leaves and comes back, {number + 1} of {times}")
            node = f"n{number % WORKERS}"  # in turn, so that rank 0 leaves as well as the last
            left.append(job.shrink(node))
            joined.append(job.grow(node))
            tempo.beat()
        return left, joined, pauses.step_s(job.log.events)


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line per direction."""
    pauses.show(figures, console=console)
