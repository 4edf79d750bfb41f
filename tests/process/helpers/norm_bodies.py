"""Trainings of ranks with buffers, optimizers of whole tensors, and sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rank_bodies import run_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import spectral_norm
from whole_optimizers import OPTIMIZERS, declare

from holdfast.ckpt.state.hashing import state_hash
from holdfast.elastic.config import Batch, Exact, Settings
from holdfast.elastic.groups import reform
from holdfast.elastic.loop.run import Run

STEPS = 4
MICROBATCHES = 5
DATA = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)) * 3 + 1


def started(world: reform.GenerationWorld, exact: Exact) -> Run:
    """Return a run whose shares are uneven on two and three ranks."""
    settings = Settings(batch=Batch(microbatches=MICROBATCHES, size=3), exact=exact, seed=7)
    run, _ = run_of(world, settings)
    torch.manual_seed(1)
    return run


def wrapped(model: nn.Module, world: reform.GenerationWorld, how: str) -> nn.Module:
    """Wrap a model as the name says."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp2":
        return fully_shard(model, mesh=world.mesh)
    return model


def classify(world: reform.GenerationWorld, *, exact: Exact, how: str) -> dict[str, Any]:
    """Train a classifier with norms of several kinds, one of which runs in some microbatches."""
    run = started(world, exact)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 8)
            self.norms = nn.ModuleList(
                [nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=None), nn.BatchNorm1d(8)]
            )
            self.down = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norms[1](torch.relu(self.norms[0](self.up(x))))
            return self.down(self.norms[2](x) if x.sum() > 0 else x)

    model = wrapped(Net(), world, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(STEPS):
        for x in run.microbatches(DATA):
            run.backward(model(x).square().mean())
        run.step(optimizer)
        model.eval()
        model(DATA)
        model.train()
    return ended(run, model)


def ended(run: Run, *models: nn.Module) -> dict[str, Any]:
    """Return digests of the models, and of their buffers alone."""
    run._finish()
    state = {str(at): model for at, model in enumerate(models)}
    buffers = {
        f"{at}.{name.removeprefix('module.')}": buffer
        for at, model in state.items()
        for name, buffer in model.named_buffers()
    }
    found = {"models": state_hash(state), "buffers": state_hash(buffers)}
    run._close()
    return found


def gan(world: reform.GenerationWorld, *, exact: Exact) -> dict[str, Any]:
    """Train a generator and a discriminator that sees real samples, then made ones."""
    run = started(world, exact)
    maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    judge = nn.Sequential(
        spectral_norm(nn.Linear(6, 8)), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
    )
    by_judge = torch.optim.SGD(judge.parameters(), lr=0.01)
    by_maker = torch.optim.SGD(maker.parameters(), lr=0.01)
    run.track(maker=maker, judge=judge, by_judge=by_judge, by_maker=by_maker)
    for _ in run.steps(STEPS):
        for x in run.microbatches(DATA):
            made = maker(torch.randn(len(x), 4)).detach()
            run.backward(judge(made).mean() - judge(x).mean())
        run.step(by_judge)
        for x in run.microbatches(DATA):
            run.backward(-judge(maker(torch.randn(len(x), 4))).mean())
        run.step(by_maker)
    return ended(run, maker, judge)


class Queue(nn.Module):
    """Keeps the samples it saw last, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.register_buffer("last", torch.zeros(3, 6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.last.copy_(x)
        loss: torch.Tensor = self.linear(x).square().mean()
        return loss


def queue(world: reform.GenerationWorld, *, exact: Exact) -> dict[str, Any]:
    """Train a model whose buffers follow the microbatches of its rank."""
    run = started(world, exact)
    model = Queue()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    seen = 0
    for _ in run.steps(STEPS):
        before = int(model.seen)
        for x in run.microbatches(DATA):
            run.backward(model(x))
        run.step(optimizer)
        seen = int(model.seen) - before
    return {"seen": seen, **ended(run, model)}


def optimized(world: reform.GenerationWorld, *, how: str, kind: str) -> dict[str, Any]:
    """Train by an optimizer whose update needs whole tensors, of shapes that no rank divides."""
    run = started(world, "float32")
    model: Any = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 1))
    if how == "fsdp2":
        fully_shard(model[0], mesh=world.mesh)
        fully_shard(model[2], mesh=world.mesh)
    if how == "hsdp":
        replicas = min(world.size, 2)
        sizes = (replicas, world.size // replicas)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    declare()
    first = OPTIMIZERS[kind](matrices, lr=0.01)
    second = torch.optim.AdamW(rest, lr=0.01)
    run.track(model=model, first=first, second=second)
    for _ in run.steps(STEPS):
        for x in run.microbatches(DATA):
            run.backward(model(x).square().mean())
        run.step(first, second)
    run._finish()
    found = {"models": state_hash({"model": model, "first": first, "second": second})}
    run._close()
    return found


WAYS: dict[str, Callable[[reform.GenerationWorld], dict[str, Any]]] = {
    **{
        f"{how}, {exact}": lambda world, how=how, exact=exact: classify(  # type: ignore[misc]
            world, exact=exact, how=how
        )
        for how in ("plain", "ddp", "fsdp2")
        for exact in ("float32", "int64", None)
    },
    "gan": lambda world: gan(world, exact="float32"),
    "queue": lambda world: queue(world, exact=None),
}

KINDS = tuple(OPTIMIZERS)

OPTIMIZED: dict[str, Callable[[reform.GenerationWorld], dict[str, Any]]] = {
    f"{how}, {kind}": lambda world, how=how, kind=kind: optimized(  # type: ignore[misc]
        world, how=how, kind=kind
    )
    for how in ("plain", "fsdp2", "hsdp")
    for kind in KINDS
}


def train_all(world: reform.GenerationWorld, _folder: Path) -> dict[str, Any]:
    """Train in every way, one after the other, in the same processes."""
    return {name: train(world) for name, train in WAYS.items()}


def optimize_all(world: reform.GenerationWorld, _folder: Path) -> dict[str, Any]:
    """Train by every optimizer, one after the other, in the same processes."""
    return {
        name: train(world)
        for name, train in OPTIMIZED.items()
        if not (name.startswith("hsdp") and world.size == 3)
    }


class Factors(nn.Module):
    """Factorizes a matrix; some microbatches use neither table."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(11, 4, sparse=True)
        self.items = nn.Embedding(7, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        users, items = x[:, 0], x[:, 1]
        if int(users.sum()) % 3 == 0:
            return self.head(torch.ones(len(x), 4))
        return self.head(self.users(users) * self.items(items))


def factorize(world: reform.GenerationWorld, *, exact: Exact, how: str) -> dict[str, Any]:
    """Train embeddings with sparse gradients."""
    run = started(world, exact)
    model = wrapped(Factors(), world, how)
    tables = [p for p in model.parameters() if p.shape[-1] == 4 and p.shape[0] > 1]
    rest = [p for p in model.parameters() if all(p is not each for each in tables)]
    sparse = torch.optim.SparseAdam(tables, lr=0.05)
    dense = torch.optim.Adam(rest, lr=0.05)
    run.track(model=model, sparse=sparse, dense=dense)
    data = torch.randint(0, 7, (60, 2), generator=torch.Generator().manual_seed(3))
    norms = []
    for _ in run.steps(2 * STEPS):
        for x in run.microbatches(data):
            run.backward((model(x).squeeze(1) - x.sum(1)).square().mean())
        norms.append(run.clip_grad_norm_(model.parameters(), 1.0))
        run.step(sparse, dense)
    run._finish()
    digest = state_hash({"model": model, "sparse": sparse, "dense": dense})
    run._close()
    return {"models": digest, "norms": norms}


FACTORIZED: dict[str, Callable[[reform.GenerationWorld], dict[str, Any]]] = {
    f"{how}, {exact}": lambda world, how=how, exact=exact: factorize(  # type: ignore[misc]
        world, exact=exact, how=how
    )
    for how in ("plain", "ddp")
    for exact in ("float32", "int64", None)
}


def factorize_all(world: reform.GenerationWorld, _folder: Path) -> dict[str, Any]:
    """Train embeddings in every way, one after the other, in the same processes."""
    return {name: train(world) for name, train in FACTORIZED.items()}
