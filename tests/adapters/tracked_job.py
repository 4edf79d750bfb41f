"""A training with three trackers that is killed at a step; prints what they have as JSON.

The first process that comes to the body of step ``--kill`` kills itself, once the step before the
last is protected. ``--read`` trains nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.adapters.trackers import MLflow, TensorBoard, WandB
from holdfast.adapters.trackers.wandb_parts import records

STEPS = 12
parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--kill", type=int, default=-1)
parser.add_argument("--read", action="store_true")
args = parser.parse_args()
out: Path = args.out


def _dies(run: holdfast.Run, step: int) -> None:
    if not args.kill - 2 <= step <= args.kill or not run.is_leader or (out / "died").exists():
        return
    while run.protection.step < step - 1:  # so that trackers got steps before
        run.check()
        time.sleep(0.01)
    if step < args.kill:
        return
    (out / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=2, size=4),
    checkpoint=holdfast.Checkpoints(str(out / "checkpoints"), every=1),
    exact="float32",
)
def train(run: holdfast.Run) -> None:
    """Train and log; the trackers begin anew in each generation."""
    torch.set_num_threads(1)
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    run.log_to(
        TensorBoard(out / "tensorboard"),
        WandB("project", run="first", directory=out / "wandb"),
        MLflow(out, run="first"),
    )
    for step in run.steps(STEPS):
        for batch in run.microbatches(data):
            loss = model(batch).square().mean()
            run.backward(loss)
            run.log(**{"loss": loss, "twice/loss": 2 * loss})
        run.step(optimizer)
        _dies(run, step)


def of_tensorboard() -> list[Any]:
    """Return (step, tag, value) in the order of the files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    return [
        (each.step, tag, each.value)
        for tag in sorted(board.Tags()["scalars"])
        for each in board.Scalars(tag)
    ]


def of_mlflow() -> list[Any]:
    """Return (step, name, value), and the state of the run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    assert run.info.status == "FINISHED"
    return [
        (each.step, name, each.value)
        for name in ("loss", "twice/loss")
        for each in sorted(client.get_metric_history(run.info.run_id, name), key=lambda m: m.step)
    ]


def of_wandb() -> list[Any]:
    """Return (step, name, value) of all parts of the run; a step may lie in two parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = set()
    for part in (out / "wandb" / "wandb").glob("offline-run-*/*.wandb"):
        for data in records(part.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                found |= {(values["_step"], n, values[n]) for n in ("loss", "twice/loss")}
    return sorted(found, key=lambda each: (each[1], each[0]))


if args.read:
    print(json.dumps([of_tensorboard(), of_mlflow(), of_wandb()]))
else:
    train()
