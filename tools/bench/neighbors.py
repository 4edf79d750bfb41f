"""Section neighbors: the loss after a lost block was set from its neighbours, beside other ways.

One process trains a byte-level GPT of eight blocks, each of which stands for a stage. At one step
an inner block is lost with its optimizer state. Each way goes on from there with the same samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import torch
from rich.console import Console

from holdfast.elastic.neighbors.layers import StageTensor, map_stages
from holdfast.tools.bench.islands.learner import SmallGPT, Windows, held_out
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo, by_line

_BLOCKS: Final = 8
_LOST: Final = 3
_SAMPLES: Final = 8
_SEEDS: Final = 3
_FRESH_SEED: Final = 1_000
_LR: Final = 2e-3
_SECTION: Final = "neighbors"


@dataclass(frozen=True, slots=True, kw_only=True)
class LookPlan:
    """Steps before the loss, steps to the checkpoint before it, and the steps then to look at."""

    lost_at: int
    back: int
    looks: tuple[int, ...]


_FULL: Final = LookPlan(lost_at=240, back=80, looks=(0, 10, 40, 80))
_QUICK: Final = LookPlan(lost_at=6, back=3, looks=(0, 2, 4))


class Learner:
    """A model in training; ``step`` counts its complete steps."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = SmallGPT(blocks=_BLOCKS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LR)
        self.step, self._seed = 0, seed

    def train(self, data: Windows, *, until: int) -> None:
        """Train to a step, with the samples that belong to the steps."""
        while self.step < until:
            drawn = torch.Generator().manual_seed(self._seed * 1_000_003 + self.step)
            numbers = torch.randint(len(data), (_SAMPLES,), generator=drawn)
            self.optimizer.zero_grad()
            self.model(torch.stack([data[int(number)] for number in numbers])).backward()
            self.optimizer.step()
            self.step += 1


def _mean(learner: Learner, names: Mapping[str, tuple[str, ...]]) -> None:
    _set(learner, names, lambda own, near: (near[0] + near[1]) / 2)


def _copy(learner: Learner, names: Mapping[str, tuple[str, ...]]) -> None:
    _set(learner, names, lambda own, near: near[0])


def _fresh(learner: Learner, names: Mapping[str, tuple[str, ...]]) -> None:
    new = dict(Learner(_FRESH_SEED).model.named_parameters())
    _set(learner, names, lambda own, near: new[own])


def _nothing(learner: Learner, names: Mapping[str, tuple[str, ...]]) -> None:
    pass


@torch.no_grad()
def _set(
    learner: Learner,
    names: Mapping[str, tuple[str, ...]],
    value: Callable[[str, Sequence[torch.Tensor]], torch.Tensor],
) -> None:
    """Set the parameters of the lost block, and drop their optimizer state."""
    every = dict(learner.model.named_parameters())
    for name, near in names.items():
        every[name].copy_(value(name, [every[other] for other in near]))
        learner.optimizer.state.pop(every[name], None)


NOTHING_LOST: Final = "nothing lost"
BACK: Final = "back to a checkpoint"
WAYS: Final[Mapping[str, Callable[[Learner, Mapping[str, tuple[str, ...]]], None]]] = {
    NOTHING_LOST: _nothing,
    "mean of the neighbours": _mean,
    "copy of one neighbour": _copy,
    "fresh initialisation": _fresh,
    BACK: _nothing,
}


def neighbors(setup: BenchSetup) -> list[Figure]:
    """Measure the held-out loss after the loss of a block, by way and by seed."""
    schedule, seeds = (_QUICK, 1) if setup.quick else (_FULL, _SEEDS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Tempo(setup, total=seeds * (1 + len(WAYS))) as tempo:
            found = [_of_seed(seed, schedule, tempo) for seed in range(seeds)]
    finally:
        torch.set_num_threads(threads)
    return [
        _figure(way, look, [each[way][at] for each in found])
        for way in WAYS
        for at, look in enumerate(schedule.looks)
    ]


def _of_seed(seed: int, schedule: LookPlan, tempo: Tempo) -> dict[str, list[float]]:
    """Return the losses of every way at the looks."""
    data, learner = Windows(), Learner(seed)
    tempo.say(f"seed {seed}: before the loss")
    learner.train(data, until=schedule.lost_at - schedule.back)
    saved = _state(learner)
    learner.train(data, until=schedule.lost_at)
    newest = _state(learner)
    tempo.beat()
    names = lost_names(learner.model)
    found: dict[str, list[float]] = {}
    for way, apply in WAYS.items():
        tempo.say(f"seed {seed}: {way}")
        _load(learner, saved if way == BACK else newest)
        began = learner.step
        apply(learner, names)
        found[way] = []
        for look in schedule.looks:
            learner.train(data, until=began + look)
            found[way].append(held_out(learner.model))
        tempo.beat()
    return found


def lost_names(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the parameters of the lost block, with their counterparts beside it."""
    tensors = [
        StageTensor(name, int(name.split(".")[1]), str(each.dtype), tuple(each.shape))
        for name, each in model.named_parameters()
        if name.startswith("blocks.")
    ]
    found = map_stages(tensors, count=_BLOCKS)
    return {name: found.sources[name] for name, stage in found.stage_of.items() if stage == _LOST}


def _state(learner: Learner) -> tuple[dict[str, Any], dict[str, Any], int]:
    model, optimizer = learner.model.state_dict(), learner.optimizer.state_dict()
    return copy.deepcopy(model), copy.deepcopy(optimizer), learner.step


def _load(learner: Learner, saved: tuple[dict[str, Any], dict[str, Any], int]) -> None:
    model, optimizer, learner.step = copy.deepcopy(saved)
    learner.model.load_state_dict(model)
    learner.optimizer.load_state_dict(optimizer)


def _figure(way: str, look: int, losses: Sequence[float]) -> Figure:
    return Figure(
        section=_SECTION,
        name=f"{way}: {look}",
        value=fmean(losses),
        unit="",
        low=min(losses),
        high=max(losses),
    )


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print a line for each way."""
    looks = dict.fromkeys(figure.name.rpartition(": ")[2] for figure in figures)
    columns = {look: f"after {look} steps" if look != "0" else "at once" for look in looks}
    console.print(by_line(figures, columns=columns, cell=_cell))
    console.print(
        f"Loss on held-out text, mean (lowest to highest) of the seeds. One of {_BLOCKS} blocks is "
        "lost. The steps are\nthose after the loss; a run that goes back repeats the steps since "
        "the checkpoint first.\n"
    )


def _cell(figure: Figure) -> str:
    return f"{figure.value:.3f} ({figure.low:.3f}–{figure.high:.3f})"
