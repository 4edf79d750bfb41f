"""A small training that is left in several ways; each rank writes its end into a folder."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--progress")
parser.add_argument("--out", type=Path)
parser.add_argument("--checkpoint")
args = parser.parse_args()
torch.set_num_threads(1)
STEPS, AT = 10, 5


def _await(name: str, run: holdfast.Run | None = None) -> None:
    """Wait for a file of the test's."""
    while not (args.out / name).exists():
        if run is not None:
            run.check()
        time.sleep(0.02)


def _log(step: int, metrics: dict[str, float]) -> None:
    with (args.out / "logged.jsonl").open("a") as log:
        log.write(json.dumps([step, metrics["loss"]]) + "\n")


def _is_leaver(run: holdfast.Run, step: int) -> bool:
    return step == AT and ("all" in args.mode or run.is_leader)


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint=args.checkpoint
)
def train(run: holdfast.Run) -> str:
    """Train, and leave in step 5 as the mode says."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    if args.mode == "lead-skip" and run.is_leader:
        return "early"
    if args.mode == "all-break-top":
        run.on_protected(_log)
    for step in run.steps(STEPS):
        if args.mode in ("all-break-top", "lead-break-top") and _is_leaver(run, step):
            break
        try:
            for x in run.microbatches(data):
                if args.mode == "lead-break-inside" and _is_leaver(run, step):
                    return "early"
                if args.mode == "lead-catch" and _is_leaver(run, step):
                    raise ZeroDivisionError
                loss = model(x).square().mean()
                run.backward(loss)
                run.log(loss=loss)
            run.step(optimizer)
        except ZeroDivisionError:
            continue
        assert run.metrics["loss"] > 0
        if args.mode == "late" and step == AT:
            (args.out / f"at-{run.rank}").touch()
            _await("go", run)
        if not _is_leaver(run, step):
            continue
        if "stop" in args.mode:
            run.stop()
        elif "break" in args.mode:
            break
        elif "return" in args.mode:
            return "early"
        elif "raise" in args.mode:
            raise ValueError("no such column")
    for _ in run.steps(STEPS + 3) if args.mode == "two-loops" else ():
        for x in run.microbatches(data):
            run.backward(model(x).square().mean())
        run.step(optimizer)
    if args.mode == "lead-recv" and not run.is_leader:
        dist.recv(torch.zeros(1), src=0)
    weights = [value.hex() for value in model.weight.flatten().tolist()]
    said = {"completed": run.completed, "weights": weights, "loss": run.metrics.get("loss")}
    (args.out / f"rank-{run.rank}.json").write_text(json.dumps(said))
    return "complete"


if args.mode == "late" and json.loads(os.environ["HOLDFAST_WORKER"])["attempt"] > 1:
    (args.out / "started").touch()
    _await("over")
train()
