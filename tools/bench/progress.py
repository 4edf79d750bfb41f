"""The run of the chosen sections, with a line that tells the progress and the time left."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from holdfast.tools.bench.samples import BenchSetup
from holdfast.tools.bench.sections import SECTIONS, Result

_WHOLE_RUN_S = 1e9
"""The time left is told by the pace since the beginning: sections differ by their rounds."""


def measured(
    sections: Sequence[str], setup: BenchSetup, *, console: Console
) -> Iterator[tuple[str, list[Result], float]]:
    """Run one section after the other; yield its name, its figures and its seconds.

    The line shows on ``console`` if that is a terminal, and disappears while a section's figures
    are with the caller.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left about"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=_WHOLE_RUN_S,
    )
    task, before = bar.add_task("", total=sum(SECTIONS[name].seconds for name in sections)), 0.0
    for number, name in enumerate(sections, start=1):
        title, laps = f"{name} ({number} of {len(sections)})", iter(range(1, setup.repeat + 1))
        share = SECTIONS[name].seconds / (setup.repeat + 1)

        def lap(*, laps: Iterator[int] = laps, begun: float = before, share: float = share) -> None:
            if done := next(laps, None):
                bar.update(task, completed=begun + share * done)

        def say(text: str, *, title: str = title) -> None:
            bar.update(task, description=f"{title}: {text}")

        with bar, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            bar.update(task, description=title)
            started_s = time.perf_counter()
            found = SECTIONS[name].measure(dataclasses.replace(setup, lap=lap, say=say))
            before += SECTIONS[name].seconds
            bar.update(task, completed=before)
        yield name, found, time.perf_counter() - started_s
