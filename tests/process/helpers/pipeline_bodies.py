"""A small model in pipeline stages, trained on any mesh with such stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from expert_bodies import Mixture
from mesh_bodies import STEPS, TOKENS, WIDTH, samples, whole
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from holdfast.ckpt import ModelParts
from holdfast.elastic.loop.run import Run

BLOCKS = STAGES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Deep(nn.Module):
    """All of the model, or after `keep` the blocks of one stage under the same names."""

    def __init__(self, dropout: float, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleDict({str(i): block() for i in range(BLOCKS)})
        self.dropout = nn.Dropout(dropout)
        self.head: nn.Module | None = nn.Linear(WIDTH, TOKENS)

    def keep(self, stage: int, stages: int) -> Deep:
        mine = range(BLOCKS * stage // stages, BLOCKS * (stage + 1) // stages)
        for name in list(self.blocks):
            if int(name) not in mine:
                del self.blocks[name]
        self.embed = self.embed if stage == 0 else None
        self.head = self.head if stage == stages - 1 else None
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = self.dropout(block(x))
        return x if self.head is None else self.head(x)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def feed(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return batch, (batch + 1) % TOKENS


SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "bfs": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
}


def schedule_of(kind: str) -> Any:
    """Return the kind of schedule that a kind of training names, None without stages."""
    return next((SCHEDULES[word] for word in kind.split() if word in SCHEDULES), None)


def part_of(kind: str, run: Run, *, stage: int, stages: int) -> Deep:
    """Return a stage: sharded with ``fsdp`` in its name, with ``dropout`` in it or without.

    Its blocks are mixtures of ``experts``, or are not.
    """
    torch.manual_seed(1)
    mixture = functools.partial(Mixture, dropout=0.0)
    model = Deep(0.1 if "dropout" in kind else 0.0, mixture if "experts" in kind else Block)
    model.keep(stage, stages)
    for block in model.blocks.values():
        if isinstance(block, Mixture):
            block.spread(run.mesh["ep"])
    if "fsdp" in kind:
        for block in model.blocks.values():
            fully_shard(block, mesh=run.mesh["dp"])
        fully_shard(model, mesh=run.mesh["dp"])
    assert isinstance(model, FSDPModule) == ("fsdp" in kind)
    return model


def build(run: Run, kind: str) -> tuple[Deep | ModelParts, Any]:
    """Return what this rank has of the model, and the schedule of its stages, if it is cut.

    With a schedule for several stages per rank there are `STAGES` of them, whatever the mesh.
    """
    schedule = schedule_of(kind)
    if schedule is None:
        return part_of(kind, run, stage=0, stages=1), None
    rank, size = run.mesh["pp"].get_local_rank(), run.mesh["pp"].size()
    options = {"n_microbatches": run.share, "loss_fn": loss_of, "scale_grads": False}
    if issubclass(schedule, PipelineScheduleMulti):
        model = ModelParts(
            part_of(kind, run, stage=i, stages=STAGES) for i in range(rank, STAGES, size)
        )
        return model, schedule(run.stages(model), **options)
    part = part_of(kind, run, stage=rank, stages=size)
    return part, schedule(run.stage(part), **options)


def settle(model: Deep | ModelParts, kind: str) -> None:
    """Freeze a layer and end the dropout for good, in a kind that is ``settled``."""
    for part in model if isinstance(model, ModelParts) else [model]:
        if "settled" in kind and isinstance(part, Deep):
            part.dropout.eval()
            if "1" in part.blocks:
                part.blocks["1"].mix.requires_grad_(False)


def train(
    run: Run, kind: str, *, steps: int = STEPS, hold: Callable[[Run], None] = lambda _: None
) -> dict[str, Any]:
    """Train a few steps; return this rank's weights and the observations of each step."""
    model, schedule = build(run, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    norms, losses = [], []
    for step in run.steps(steps):
        losses += run.metrics.values()
        if step == 0:
            settle(model, kind)
        hold(run)
        if schedule is not None:
            run.pipeline(schedule, samples(), feed=feed)
        else:
            for batch in run.microbatches(samples()):
                x, y = feed(batch)
                loss = loss_of(model(x), y)
                run.backward(loss)
                run.log(loss=loss)
        norms.append(run.clip_grad_norm_(model.parameters(), 0.8))
        run.step(optimizer)
    losses += run.metrics.values()
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return {"weights": weights, "norms": norms, "losses": losses}


def weights_of(results: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the weights of all stages; ranks that have the same ones agree on them."""
    found: dict[str, list[float]] = {}
    for result in results:
        for name, values in result["weights"].items():
            assert found.setdefault(name, values) == values
    return found
