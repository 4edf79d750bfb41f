"""A model that no number of ranks divides evenly, and ways to spread it over four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WORLD_SIZE = 4
State = dict[str, Any]
Wrap = Callable[[nn.Module], None]


class Net(nn.Module):
    """Uneven over three ranks (7 rows), empty at the last (2 rows), even where parallel (8).

    With ``tied`` it has a head whose weight is the embedding's.
    """

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.up = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 8)
        self.small = nn.Linear(8, 2)
        self.head: nn.Linear | None = None
        if tied:
            self.head = nn.Linear(8, 7, bias=False)
            self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        loss: torch.Tensor = self.small(x).square().sum()
        return loss if self.head is None else loss + self.head(x).sum()


def data_parallel(ranks: list[int]) -> Wrap:
    """Return what shards a model over these ranks."""
    mesh = DeviceMesh("cpu", ranks)

    def wrap(model: nn.Module) -> None:
        fully_shard(model, mesh=mesh, reshard_after_forward=False)

    return wrap


def tensor_parallel() -> Wrap:
    """Return what cuts a model's matrices over all ranks."""
    mesh = DeviceMesh("cpu", list(range(WORLD_SIZE)))

    def wrap(model: nn.Module) -> None:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    return wrap


def grid() -> Wrap:
    """Return what does both, on a mesh of two by two."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))

    def wrap(model: nn.Module) -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)

    return wrap


def build(wrap: Wrap | None, seed: int, *, tied: bool) -> State:
    """Return a fresh model with its optimizer and the count of its samples."""
    torch.manual_seed(seed)
    model = Net(tied=tied)
    if wrap:
        wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed))
    return {"model": model, "optimizer": optimizer, "seen": {"samples": seed}}


def train(state: State, steps: int, *, seed: int) -> None:
    """Take so many steps on samples of this seed, and count them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, 7, (5,), generator=generator)
        state["model"](tokens).backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["seen"]["samples"] += 5
