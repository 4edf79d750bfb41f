"""A training whose metrics go to a file by `run.on_protected`, with gates at which a test kills.

``held_out`` is of an evaluation between steps. At a gate the leader waits for the test, once all
earlier steps are protected and handed over, and there is another rank that knows of it. With
``--dies STEP`` the process that writes that step kills itself right after; from then on the log is
read at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch

import holdfast
from holdfast.elastic.channel.connecting import connect

parser = argparse.ArgumentParser()
parser.add_argument("--progress")
parser.add_argument("--out", type=Path)
parser.add_argument("--gates", nargs="*", type=int, default=[])
parser.add_argument("--dies", type=int, default=-1)
args = parser.parse_args()
torch.set_num_threads(1)
STEPS = 12
log, died = args.out / "log.jsonl", args.out / "died"
bodies = args.out / "bodies.jsonl"


def write(step: int, metrics: dict[str, float]) -> None:
    """Append a step to the log."""
    with log.open("a") as file:
        row = [step, metrics["loss"].hex(), metrics["held_out"].hex()]
        file.write(json.dumps(row) + "\n")
    if step == args.dies and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _goes_on(run: holdfast.Run, step: int) -> bool:
    """Return whether all is as it has to be at the next gate."""
    if step + 2 in args.gates and run.world_size == 1:
        return connect().halts(run.generation)  # then another joins at the end of the next step
    return step + 1 not in args.gates or run.protection.step >= step


def _wait(run: holdfast.Run, step: int) -> None:
    """Wait at the gate before ``step`` ends."""
    if run.is_leader:
        (args.out / f"at-{step}").write_text(str(os.getpid()))
    while not (args.out / f"go-{step}").exists():
        run.check()
        time.sleep(0.02)


@holdfast.resilient(batch=holdfast.Batch(microbatches=3, size=2), exact="float32")
def train(run: holdfast.Run) -> None:
    """Train, and log the loss of every step."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    last = json.loads(log.read_text().splitlines()[-1])[0] if died.exists() else -1
    run.on_protected(write, after=last)
    for step in run.steps(STEPS):
        for x in run.microbatches(data):
            loss = model(x).square().mean()
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        with torch.no_grad():
            run.log(held_out=model(data[:8]).square().mean())
        with bodies.open("a") as file:
            file.write(json.dumps([step, run.rank, run.generation, run.repeats]) + "\n")
        while not _goes_on(run, step):
            run.check()
            time.sleep(0.02)
        if step in args.gates:
            _wait(run, step)


train()
