"""One small model divided in every way a mesh allows, and its training on any of these meshes.

The stages of a pipeline have their own model, in `pipeline_bodies`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expert_bodies
import torch
from expert_bodies import TOKENS
from rank_bodies import run_of
from ranks import enter, ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from holdfast.ckpt.state.hashing import state_hash
from holdfast.elastic.config import Batch, Exact, Mesh, Settings
from holdfast.elastic.groups import reform
from holdfast.elastic.loop.run import Run
from holdfast.elastic.membership.records import MeshSize

WIDTH, STEPS = 16, 4
BATCH = Batch(microbatches=5, size=3)


class Block(nn.Module):
    """A norm that no plan cuts, and a pair of layers that tensor parallelism does."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Guesses the next token. Dropout would differ along a sequence that is cut."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, ((text + 1) % TOKENS).flatten())


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut layers over the axis ``tp``."""
    plan = {
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh["tp"], plan)


def cut_sequence(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut layers, and between them the sequence: norms have partial gradients then."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh["tp"], plan)


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Shard the rest of each layer over the data axes."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


BUILDS: dict[str, Callable[[Run], nn.Module]] = {
    "sequence": lambda run: cut_sequence(Net(dropout=0.0), run.mesh),
    "fsdp_tp": lambda run: shard(cut(Net(), run.mesh), run.mesh["dp"]),
    "fsdp": lambda run: shard(Net(), run.mesh["dp"]),
    "sequence_alone": lambda run: Net(dropout=0.0),
    "hsdp": lambda run: shard(Net(), run.mesh["replicate", "shard"]),
    "hsdp_tp": lambda run: shard(cut(Net(), run.mesh), run.data_mesh),
    "plain": lambda run: Net(),
    "experts": expert_bodies.build,
    "experts_fsdp": expert_bodies.build_sharded,
}


def samples() -> torch.Tensor:
    """Forty texts."""
    return torch.arange(40 * 8).reshape(40, 8) * 7 % TOKENS


def train(
    run: Run, kind: str, *, steps: int = STEPS, hold: Callable[[Run], None] = lambda _: None
) -> dict[str, Any]:
    """Train a few steps; return the hash of the weights and the observations of each step.

    ``hold`` is called at the start of every step.
    """
    torch.manual_seed(1)
    model = BUILDS[kind](run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    norms, seen, losses = [], [], []
    for _ in run.steps(steps):
        losses += run.metrics.values()
        hold(run)
        for batch in run.microbatches(samples()):
            seen.append(batch[:, 0].tolist())
            loss = model(batch)
            run.backward(loss)
            run.log(loss=loss)
        norms.append(run.clip_grad_norm_(model.parameters(), 0.8))
        run.step(optimizer)
    losses += run.metrics.values()
    return {
        "hash": state_hash({"model": model, "optimizer": optimizer}),
        "weights": {name: whole(parameter) for name, parameter in model.named_parameters()},
        "norms": norms,
        "losses": losses,
        "seen": seen,
    }


def whole(tensor: torch.Tensor) -> list[float]:
    """Return all elements of a tensor, wherever they lie; collective for a DTensor."""
    value = tensor.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()


Train = Callable[..., dict[str, Any]]
"""Trains ``(run, kind, *, steps)``: `train`, or that of `pipeline_bodies`."""

Turn = tuple[MeshSize, Mesh, list[str], Exact]
"""A mesh, how it was asked for, what to train on it, and whether exactly."""


def train_in_turn(
    rank: int,
    stores: list[str],
    folder: Path,
    *,
    turns: list[Turn],
    train: Train = train,
    steps: int = STEPS,
    batch: Batch = BATCH,
) -> list[Any]:
    """Train on one mesh after the other in the same process, each in a generation of its own."""
    found = []
    for number, (size, mesh, kinds, exact) in enumerate(turns, start=1):
        world = enter(rank, stores, folder, number=number, mesh=size, axes=mesh.axes)
        for kind in kinds:
            settings = Settings(mesh=mesh, batch=batch, exact=exact, seed=7)
            run, _ = run_of(world, settings)
            found.append(train(run, kind, steps=steps))
            run._finish()
            run._close()
        world.barrier()
        reform.leave()
    return found


def all_ranks(
    turns: list[Turn], folder: Path, *, train: Train = train, steps: int = STEPS
) -> list[tuple[dict[str, Any], ...]]:
    """Run `train_in_turn` on as many processes as there are ranks; return theirs by training."""
    body = functools.partial(train_in_turn, turns=turns, train=train, steps=steps)
    with ranks(turns[0][0].ranks, body, folder, with_world=False) as running:
        return list(zip(*running.results(), strict=True))
