"""Training with Fabric in Holdfast's format, on ranks that kill themselves and begin again.

    python lightning_job.py FOLDER    prints a report of all runs as JSON

All ranks are forked from this process, which has imported what they need.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from holdfast import ckpt
from holdfast.adapters.lightning import holdfast_strategy, random_states

STEPS, EVERY, DEADLINE_S = 12, 3, 300


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run; with ``die_at`` its ranks kill themselves after that step."""

    root: str
    sharded: bool = False
    noisy: bool = True
    die_at: int | None = None


def shard(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """Shard a model over the data-parallel axis."""
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def trained(plan: Plan, ranks: int) -> dict[str, Any]:
    """Train to the last step, from the newest checkpoint on."""
    made: Any = (
        holdfast_strategy(ModelParallelStrategy)(
            parallelize_fn=shard, data_parallel_size=ranks, tensor_parallel_size=1
        )
        if plan.sharded
        else holdfast_strategy(DDPStrategy)()
    )
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=made)
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    middle = [torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3)] if plan.noisy else []
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), *middle, torch.nn.Linear(16, 1))
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 4, 0.5)
    rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    # without a generator of its own a loader draws from the global one as it begins
    loader = fabric.setup_dataloaders(
        DataLoader(TensorDataset(rows), batch_size=12 // ranks, generator=torch.Generator())
    )
    torch.manual_seed(10 + fabric.global_rank)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "random": random_states(fabric.device),
        "step": 0,
        "name": "job",
    }
    rest: dict[str, Any] = {}
    if Path(plan.root).exists():
        rest = fabric.load(plan.root, {k: v for k, v in state.items() if k != "name"})
        fabric.load(plan.root, state)
    begun_at = state["step"]
    while state["step"] < STEPS:
        for number, (x,) in enumerate(loader):
            if number < state["step"] % len(loader):
                continue  # trained on before
            drawn = torch.randn_like(x) + random.random() + np.random.rand()
            y = x + 0.1 * drawn * plan.noisy
            fabric.backward((model(y) - y.sum(1, keepdim=True)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state["step"] += 1
            if state["step"] % EVERY == 0:
                fabric.save(f"{plan.root}/step-{state['step']}", state)
            if state["step"] == plan.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    parts = [p.full_tensor() if plan.sharded else p for p in model.parameters()]
    weights = torch.cat([each.detach().double().flatten() for each in parts]).tolist()
    return {
        "begun_at": begun_at,
        "rest": rest,
        "lr": schedule.get_last_lr(),
        "weights": weights,
        "hash": sha256(repr(weights).encode()).hexdigest(),
    }


def rank_main(rank: int, ranks: int, port: int, pipe: Any, work: Callable[[], Any]) -> None:
    """Run one rank and send what it returns."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pipe.send(work())
    torch.distributed.destroy_process_group()


def run(plan: Any, *, ranks: int, body: Callable[[Any, int], Any] = trained) -> list[Any]:
    """Return what the ranks sent; None of those that died as planned."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context, pipes, processes = multiprocessing.get_context("fork"), [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        work = partial(body, plan, ranks)
        process = context.Process(target=rank_main, args=(rank, ranks, port, theirs, work))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    found: list[Any] = []
    for pipe in pipes:
        assert pipe.poll(DEADLINE_S), "a rank said nothing"
        try:
            found.append(pipe.recv())
        except EOFError:
            found.append(None)
    for process in processes:
        process.join(DEADLINE_S)
    wanted = 0 if plan.die_at is None else -signal.SIGKILL
    assert [each.exitcode for each in processes] == [wanted] * ranks
    return found


def refused(fabric: Fabric, folder: Path) -> list[str]:
    """Return the messages of calls that are refused."""
    model = fabric.setup(torch.nn.Linear(2, 2))
    found: list[str] = []
    calls: list[Any] = [
        lambda: fabric.save(folder / "a", {"model": model}),
        lambda: fabric.save(folder / "a" / "step-1", {"model": model}, filter={"model": bool}),
        lambda: fabric.load(folder / "a"),
        lambda: fabric.load_raw(folder / "a", model),
        lambda: fabric.load(folder / "a" / "step-7", {"model": model}),
    ]
    for call in calls:
        try:
            call()
        except ckpt.CkptError as error:
            found.append(str(error))
    fabric.save(folder / "a" / "step-1", {"model": model, "more": 5})
    found.append(str(fabric.load(folder / "a", {"model": model})))
    return found


def main(folder: Path) -> None:
    """Run everything and print the report."""
    import_for_ranks()
    report: dict[str, Any] = {}
    for name, sharded, noisy in (("ddp", False, True), ("fsdp2", True, False)):
        plan = Plan(root=str(folder / name), sharded=sharded, noisy=noisy)
        whole = replace(plan, root=str(folder / f"{name}-whole"))
        report[f"{name} whole"] = run(whole, ranks=2)
        report[f"{name} killed"] = run(replace(plan, die_at=8), ranks=2)
        shutil.copytree(plan.root, f"{plan.root}-alone")
        report[f"{name} again"] = run(plan, ranks=2)
    alone = Plan(root=str(folder / "fsdp2-alone"), noisy=False)
    report["alone"] = run(alone, ranks=1)
    with ckpt.open(folder / "ddp") as opened:
        report["names"] = sorted(opened)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=holdfast_strategy(DDPStrategy)())
    fabric.launch()
    report["refused"] = refused(fabric, folder)
    print(json.dumps(report))


def import_for_ranks() -> None:
    """Import here what the first optimizer would import in every rank."""
    torch.optim.SGD([torch.zeros(1)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
