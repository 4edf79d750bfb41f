"""A training script through a GradScaler or LBFGS, ``--way scaler`` or ``--way lbfgs``.

With the scaler the loss of two steps is infinite in their first microbatch. With ``--gate FILE``
step 5 waits until the file exists.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from holdfast import elastic
from holdfast.ckpt.state.hashing import state_hash

DATA = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
STEPS = 9


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a microbatch."""
    return (model(x).squeeze(-1) - x.sin().sum(-1)).square().mean()


def scaled(run: elastic.Run, model: nn.Module) -> None:
    """Train with AdamW through a GradScaler."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    run.track(model=model, optimizer=optimizer, scaler=scaler)
    for step in run.steps(STEPS):
        wait(run, step)
        for x in run.microbatches(DATA):
            loss = loss_of(model, x)
            run.log(loss=loss)
            if step in (2, 6) and run.microbatch == 0:
                loss = loss * float("inf")
            run.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        norm = run.clip_grad_norm_(model.parameters(), 1.0)
        run.step(optimizer, scaler=scaler)
        run.log(norm=0.0 if norm != norm else norm, scale=scaler.get_scale())
    tell(run, model, optimizer, scaler.state_dict())


def searched(run: elastic.Run, model: nn.Module) -> None:
    """Train with LBFGS, whose history is a part of the state."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    run.track(model=model, optimizer=optimizer)

    def closure() -> None:
        for x in run.microbatches(DATA):
            loss = loss_of(model, x) + 0.1 * torch.rand(())
            run.backward(loss)
            run.log(loss=loss)

    for step in run.steps(STEPS):
        wait(run, step)
        run.minimize(optimizer, closure)
    tell(run, model, optimizer, optimizer.state_dict()["state"][0]["n_iter"])


def wait(run: elastic.Run, step: int) -> None:
    """Wait in step 5, as long as the generation lasts, until the file is there."""
    while step == 5 and args.gate and not args.gate.exists():
        run.check()
        time.sleep(0.01)


def tell(run: elastic.Run, model: nn.Module, optimizer: object, extra: object) -> None:
    """Write what all ranks have to agree on."""
    digest = state_hash({"model": model, "optimizer": optimizer})
    found = {"hash": digest, "metrics": run.metrics, "extra": extra}
    Path(f"{args.result}.{run.rank}").write_text(json.dumps(found))


@elastic.resilient(batch=elastic.Batch(microbatches=4, size=4), exact="float32")
def train(run: elastic.Run) -> None:
    """Train as the flags say."""
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    if args.fsdp:
        for part in (model[0], model):
            torch.distributed.fsdp.fully_shard(part, mesh=run.mesh)
    {"scaler": scaled, "lbfgs": searched}[args.way](run, model)


parser = argparse.ArgumentParser()
parser.add_argument("--result", required=True)
parser.add_argument("--way", required=True)
parser.add_argument("--gate", type=Path)
parser.add_argument("--fsdp", action="store_true")
args = parser.parse_args()
train()
