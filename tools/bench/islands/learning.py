"""Section learning: the loss of islands at equal numbers of tokens, beside DDP and one alone.

Each seed has its own first weights and samples; the seeds of all ways are the same. Nothing of it
depends on speed, so it may run beside other work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Final

from rich.console import Console

from holdfast.tools.bench.islands import jobs
from holdfast.tools.bench.islands.jobs import SAMPLES, Place
from holdfast.tools.bench.islands.learner import CONTEXT
from holdfast.tools.bench.islands.outcome import Outcome
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo, by_line

COUNT: Final = 4
"""Islands, and ranks of DDP."""

DDP, ISLANDS = f"DDP of {COUNT}", f"{COUNT} islands"
ALONE, LONGER = "one island alone", f"one alone, {COUNT} × the steps"

_STEPS, _QUICK_STEPS = 400, 8
_RATE: Final = 4e-3
_LOOKS: Final = 4
_PORT: Final = 29523
_END: Final = "the end"
_SENT: Final = "sent"


def learning(setup: BenchSetup) -> list[Figure]:
    """Train all ways under ``setup.repeat`` seeds."""
    steps = _QUICK_STEPS if setup.quick else _STEPS
    curves: dict[str, list[Outcome]] = {way: [] for way in (DDP, ISLANDS, ALONE, LONGER)}
    with Tempo(setup, total=setup.repeat * len(curves)) as tempo:
        for seed in range(setup.repeat):
            for way, found in curves.items():
                tempo.say(f"{way}, seed {seed}")
                found.append(_trained(setup, way, seed=seed, steps=steps))
                tempo.beat()
    return figures_of(curves, steps=steps)


def _trained(setup: BenchSetup, way: str, *, seed: int, steps: int) -> Outcome:
    """Train one way; return the outcome of its first process.

    Beside those that are measured, DDP has one step and islands have two.
    """
    own = steps * COUNT if way == LONGER else steps
    directory = setup.directory / f"{way.replace(' ', '-').replace(',', '')}-{seed}"
    words = ["--seed", str(seed), "--rate", str(_RATE), "--look", str(own // _LOOKS)]
    if way == ISLANDS:
        sea = str(setup.directory / f"sea-{seed}")
        places = [Place()] * COUNT
        return jobs.islands(directory, places, steps=own - 2, sea=sea, more=words)[0]
    places = [Place()] * (COUNT if way == DDP else 1)
    return jobs.ddp(directory, places, steps=own - 1, port=_PORT, more=words)[0]


def figures_of(found: Mapping[str, Sequence[Outcome]], *, steps: int) -> list[Figure]:
    """Return the mean losses of all seeds, on the way and at the end, with the least and most.

    ``sent`` are the bytes of gradients or payloads per parameter in all.
    """
    figures = []
    for way, outcomes in found.items():
        losses = {
            f"{(look + 1) * steps // _LOOKS}": [each.curve[look] for each in outcomes]
            for look in range(_LOOKS - 1)
        }
        losses[_END] = [each.held_out for each in outcomes]
        for what, samples in losses.items():
            figures.append(_figure(way, what, samples, unit="loss"))
        if way in (DDP, ISLANDS):
            sent = [each.content.sent / each.parameters for each in outcomes]
            figures.append(_figure(way, _SENT, sent, unit="bytes"))
    return figures


def _figure(way: str, what: str, samples: Sequence[float], *, unit: str) -> Figure:
    return Figure(
        section="learning",
        name=f"{way}: {what}",
        value=mean(samples),
        unit=unit,
        low=min(samples),
        high=max(samples),
        samples=tuple(samples),
    )


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print a line for each way."""
    names = dict.fromkeys(figure.name.partition(": ")[2] for figure in figures)
    columns = {name: name if name in (_END, _SENT) else f"step {name}" for name in names}
    console.print(by_line(figures, columns=columns, cell=_cell))
    seeds = len(figures[0].samples)
    console.print(
        f"Loss on held-out text: mean (least–most) of {seeds} seeds. A step of a process has "
        f"{SAMPLES} samples of {CONTEXT} tokens; at the\nend all ways but one island alone have "
        f"seen as many. On the way, islands have weights of their own, and the one\nwith {COUNT} "
        f"times the steps is shown after {COUNT} times as many. sent: bytes of gradients or "
        "payloads of a process, per\nparameter, in all.\n"
    )


def _cell(figure: Figure) -> str:
    if figure.unit == "bytes":
        return f"{figure.value:,.0f}"
    return f"{figure.value:.3f} ({figure.low:.3f}–{figure.high:.3f})"
