"""A small training that reports restored and final state, and waits for faults."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import torch

from holdfast import elastic

STEPS = 12


def tell(**fields: object) -> None:
    """Append one line to the test's log."""
    with Path(os.environ["HOLDFAST_TEST_LOG"]).open("ab", buffering=0) as log:
        log.write(msgspec.json.encode(fields) + b"\n")


def ends(run: elastic.Run) -> bool:
    """Say whether the test has said go on; ranks that are to meet meanwhile ask each other."""
    ending = Path(os.environ["HOLDFAST_TEST_END"]).exists()
    if "HOLDFAST_TEST_MEET" not in os.environ or run.world_size == 1:
        return ending
    said = torch.tensor([float(ending)])
    torch.distributed.all_reduce(said)
    return bool(said.item())


@elastic.resilient(batch=elastic.Batch(microbatches=4, size=2), exact="float32")
def train(run: elastic.Run) -> None:
    """Train a little; wait in step 6, while the test kills processes, until it continues."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    tell(pid=os.getpid(), rank=run.rank, world=run.world_size, begins=run.completed)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    for step in run.steps(STEPS):
        if step == 6 and not Path(os.environ["HOLDFAST_TEST_END"]).exists():
            tell(pid=os.getpid(), rank=run.rank, world=run.world_size, waits=step)
            while not ends(run):
                run.check()
                time.sleep(0.02)
        for x in run.microbatches(data):
            run.backward(model(x).square().mean())
        run.step(optimizer)
    weights = torch.cat([value.flatten() for value in model.parameters()])
    tell(rank=run.rank, done=run.completed, weights=[value.hex() for value in weights.tolist()])


train()
