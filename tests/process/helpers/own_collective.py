"""A training whose leader alone calls a collective in its first step."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast

DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))


@holdfast.resilient(batch=holdfast.Batch(microbatches=4, size=2), exact="float32")
def train(run: holdfast.Run) -> None:
    """Train some steps.

    ``alone`` lets the leader call a barrier, ``all`` every rank. ``gather`` lets the leader gather
    a parameter that lies in shards, while the others begin the pass.
    """
    torch.set_num_threads(1)
    model = nn.Linear(4, 4)
    if sys.argv[1] == "gather":
        fully_shard(model, mesh=run.mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(3):
        if run.is_leader and isinstance(model.weight, DTensor):
            model.weight.full_tensor()
        for batch in run.microbatches(DATA):
            run.backward(model(batch).square().mean())
        if sys.argv[1] == "all" or (run.is_leader and sys.argv[1] == "alone"):
            dist.barrier()
        run.step(optimizer)


train()
