"""A small model in the stages of a pipeline, trained on any mesh that has some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mesh_bodies import BATCH, STEPS, TOKENS, WIDTH
from rank_bodies import run_of
from ranks import enter
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from elastic import reform
from elastic.config import Mesh, Settings
from elastic.records import MeshSize
from elastic.run import Run

BLOCKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Deep(nn.Module):
    """All of the model, or after `keep` the blocks of one stage under the same names."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(BLOCKS)})
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


def samples() -> torch.Tensor:
    return torch.arange(40 * 8).reshape(40, 8) * 7 % TOKENS


def whole(tensor: torch.Tensor) -> list[float]:
    value = tensor.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()


def build(run: Run, kind: str) -> Deep:
    """Return this rank's stage: ``fsdp`` of it sharded; ``dropout`` is in the name or is not."""
    torch.manual_seed(1)
    model = Deep(0.1 if "dropout" in kind else 0.0)
    if "pp" in run.mesh.mesh_dim_names:
        axis = run.mesh["pp"]
        model.keep(axis.get_local_rank(), axis.size())
    if "fsdp" in kind:
        for block in model.blocks.values():
            fully_shard(block, mesh=run.mesh["dp"])
        fully_shard(model, mesh=run.mesh["dp"])
    return model


def train(
    run: Run, kind: str, *, steps: int = STEPS, hold: Callable[[Run], None] = lambda _: None
) -> dict[str, Any]:
    """Train a few steps; return this stage's weights and what was seen on the way."""
    model = build(run, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    if staged := "pp" in run.mesh.mesh_dim_names:
        schedule = (ScheduleGPipe if "gpipe" in kind else Schedule1F1B)(
            run.stage(model), n_microbatches=run.share, loss_fn=loss_of, scale_grads=False
        )
    norms, losses = [], []
    for _ in run.steps(steps):
        losses += run.metrics.values()
        hold(run)
        if staged:
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
    assert isinstance(model, FSDPModule) == ("fsdp" in kind)
    return {"weights": weights, "norms": norms, "losses": losses}


Turn = tuple[MeshSize, Mesh, list[str]]


def train_in_turn(
    rank: int, stores: list[str], folder: Path, *, turns: list[Turn], steps: int = STEPS
) -> list[Any]:
    """Train exactly on one mesh after the other, each in a generation of its own."""
    found = []
    for number, (size, mesh, kinds) in enumerate(turns, start=1):
        world = enter(rank, stores, folder, number=number, mesh=size, axes=mesh.axes)
        for kind in kinds:
            settings = Settings(mesh=mesh, batch=BATCH, exact=True, seed=7)
            run, _ = run_of(world, settings)
            found.append(train(run, kind, steps=steps))
            run.finish()
            run.close()
        world.barrier()
        reform.leave()
    return found
