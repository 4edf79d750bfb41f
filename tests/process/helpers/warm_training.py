"""A small training that waits for the test in step 6 and at the end of a rehearsal."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import torch

from holdfast import elastic

STEPS = 12
FOLDER = Path(os.environ["HOLDFAST_TEST_FOLDER"])
calls = 0


def tell(**fields: object) -> None:
    """Append one line to the test's log."""
    with (FOLDER / "log.jsonl").open("ab", buffering=0) as log:
        log.write(msgspec.json.encode({"pid": os.getpid(), **fields}) + b"\n")


def wait_for(run: elastic.Run, name: str) -> None:
    """Wait for a file of the test's."""
    while not (FOLDER / name).exists():
        run.check()
        time.sleep(0.02)


@elastic.resilient(batch=elastic.Batch(microbatches=4, size=2), exact="float32")
def train(run: elastic.Run) -> None:
    """Train; a worker that comes late is called for the first time in its rehearsal."""
    global calls  # noqa: PLW0603
    calls += 1
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    if calls == 1 and run.generation > 1:
        tell(rehearses=run.completed, rank=run.rank, world=run.world_size)
        wait_for(run, "gate")
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    for step in run.steps(STEPS):
        if step == 6 and not (FOLDER / "end").exists():
            tell(waits=step, world=run.world_size, generation=run.generation)
            wait_for(run, "end")
        for x in run.microbatches(data):
            run.backward(model(x).square().mean())
        run.step(optimizer)
    weights = torch.cat([value.detach().flatten() for value in model.parameters()])
    tell(done=run.completed, weights=[value.hex() for value in weights.tolist()])


if __name__ == "__main__":
    train()
