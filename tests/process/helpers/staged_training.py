"""Two decorated functions in one script: the second begins with the first one's weights."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import holdfast
from holdfast.elastic.channel.connecting import connect

parser = argparse.ArgumentParser()
parser.add_argument("--progress")
parser.add_argument("--out", type=Path)
parser.add_argument("--gate", nargs="*", default=[], help="STAGE:STEP that wait for a file")
parser.add_argument("--join", nargs="*", default=[], help="STAGE:STEP that wait for a joiner")
parser.add_argument("--root", default="")
parser.add_argument("--same", action="store_true", help="one checkpoint directory for both")
parser.add_argument("--result", default="state", choices=["state", "module", "lead", "none"])
parser.add_argument("--only-lead", action="store_true")
args = parser.parse_args()
torch.set_num_threads(1)
STEPS = 6
BETWEEN = 0  # the stage of what the script does between the two
data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def _root(stage: int) -> holdfast.Checkpoints | None:
    place = f"{args.root}/{0 if args.same else stage}"
    return holdfast.Checkpoints(place, every=1) if args.root else None


def _tell(stage: int, step: int, run: holdfast.Run | None = None) -> None:
    """Append the step to the log; wait at its gate for the test."""
    with (args.out / "log.jsonl").open("a") as log:
        log.write(json.dumps({"stage": stage, "step": step, "pid": os.getpid()}) + "\n")
    gate = f"{stage}:{step}"
    while gate in args.gate and not (args.out / f"go-{gate}").exists():
        if run is not None:
            run.check()
        time.sleep(0.02)
    while gate in args.join and run is not None and not connect().halts(run.generation):
        run.check()
        time.sleep(0.02)


def _body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))


@holdfast.resilient(batch=holdfast.Batch(microbatches=4, size=4), exact="float32",
                    checkpoint=_root(1))  # fmt: skip
def pretrain(run: holdfast.Run) -> Any:
    """Train a body under a head of its own."""
    body, head = _body(), nn.Linear(16, 1)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-2)
    run.track(body=body, head=head, optimizer=optimizer)
    for step in run.steps(STEPS):
        for x in run.microbatches(data):
            run.backward((head(body(x)).squeeze(1) - x.sum(1)).square().mean())
        run.step(optimizer)
        _tell(1, step, run)
    if args.result == "module":
        return body
    if args.result == "none" or (args.result == "lead" and not run.is_leader):
        return None
    return {name: value.clone() for name, value in body.state_dict().items()}


@holdfast.resilient(batch=holdfast.Batch(microbatches=2, size=8), exact="float32",
                    checkpoint=_root(2))  # fmt: skip
def finetune(run: holdfast.Run, start: dict[str, torch.Tensor]) -> str:
    """Train the body on, with another optimizer and another head."""
    body, head = _body(), nn.Linear(16, 3)
    body.load_state_dict(start, strict=False)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1e-2, momentum=0.9)
    run.track(body=body, head2=head, optimizer=optimizer)
    for step in run.steps(STEPS - 2):
        for x in run.microbatches(data):
            run.backward(functional.cross_entropy(head(body(x)), (x[:, 0] > 0).long()))
        run.step(optimizer)
        _tell(2, step, run)
    return holdfast.state_hash({"body": body, "head": head, "optimizer": optimizer})


started = pretrain()
_tell(BETWEEN, 0)
if isinstance(started, dict):
    started["0.bias"] *= 2  # a script may change what it got, in a worker that starts later too
    del started["2.bias"]
if not args.only_lead or os.environ["HOLDFAST_WORKER"].find('"trainer/0"') >= 0:
    digest = finetune(started)
    (args.out / f"end-{os.getpid()}.json").write_text(json.dumps({"hash": digest}))
