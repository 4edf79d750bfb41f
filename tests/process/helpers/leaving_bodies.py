"""Functions of ranks that end their loops alike, and then differ in the collectives they call."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_bodies import await_files, run_of
from ranks import enter

from holdfast.elastic.config import Batch, Settings
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups import reform
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.groups.waits import LOOK_AFTER_S
from holdfast.elastic.loop.run import Run


def _trained(world: GenerationWorld) -> Run:
    """Return a run whose loop of two steps is over."""
    run, _ = run_of(world, Settings(batch=Batch(microbatches=3)))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(2):
        for _ in run.microbatches():
            run.backward(model(torch.ones(1, 2)).sum())
        run.step(optimizer)
    return run


def leave_at_once_and_late(rank: int, stores: list[str], folder: Path) -> dict[str, Any]:
    """Return what became of two worlds: all call the same collectives, the last one late; not."""
    run = _trained(world := enter(rank, stores, folder))
    dist.barrier()
    if rank == 2:
        await_files([folder / "left-1"])
        time.sleep(2.5 * LOOK_AFTER_S)  # rank 0 looks for who left meanwhile
    value = torch.ones(1)
    dist.gather(value, [torch.zeros(1) for _ in range(3)] if rank == 0 else None, dst=0)
    (folder / f"left-{rank}").touch()
    run._finish()
    run._close()
    reform.leave()
    run, said = _trained(enter(rank, stores, folder, number=2)), ""
    try:
        if rank:
            dist.barrier()
        run._finish()
    except ConfigError as error:
        said = str(error)
    (folder / f"told-{rank}").touch()
    await_files([folder / f"told-{other}" for other in range(3)])  # they meet at a rank's store
    run._close()
    reform.leave()
    return {"first": world.size, "second": said}
