"""A training script whose loss goes wrong on demand, under a `LossGuard`.

``--bad STEP[:TIMES]`` makes the loss of that step not finite, the first TIMES times it is run in
total (counted in ``--count FILE``; always, if no number is given). With ``--late`` rank 0, which
reports the loss, waits that many seconds from then on before it checks whether it is fenced.
``--catch``: the script catches every error inside its steps and goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path

import torch
from torch import nn

from holdfast import elastic
from holdfast.ckpt.state.hashing import state_hash
from holdfast.elastic.groups.waits import WaitGuard


def look_late(seconds: float) -> None:
    """Have this process look at the fence only after some time, as on a busy machine."""
    check = WaitGuard.check

    def late(guard: WaitGuard) -> None:
        time.sleep(seconds)
        check(guard)

    WaitGuard.check = late


def main(args: argparse.Namespace) -> None:
    """Train as the flags say."""
    torch.set_num_threads(1)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    step_of, _, times = args.bad.partition(":")

    def is_bad(run: elastic.Run) -> bool:
        if run.completed != int(step_of):
            return False
        seen = len(args.count.read_text()) if args.count.exists() else 0
        if times and seen >= int(times):
            return False
        if run.is_leader:
            with args.count.open("a") as file:
                file.write("x")
        return True

    @elastic.resilient(
        batch=elastic.Batch(microbatches=4, size=2),
        exact="float32" if args.exact else None,
        snapshots=elastic.Snapshots(keep=3),
        loss_guard=elastic.LossGuard(
            nonfinite=args.response, then=args.then, steps_back=2, limit=2
        ),
    )
    def train(run: elastic.Run) -> None:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(args.steps):
            wrong = is_bad(run)
            if wrong and args.late and run.is_leader:
                look_late(args.late)
            with contextlib.suppress(Exception) if args.catch else contextlib.nullcontext():
                for batch in run.microbatches(data):
                    loss = (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()
                    if wrong and run.is_leader:
                        loss = loss * torch.nan
                    run.backward(loss)
                    run.log(loss=loss)
                run.clip_grad_norm_(model.parameters(), 1.0)
                run.step(optimizer)
            time.sleep(args.pace)
        result = {"hash": state_hash({"model": model, "optimizer": optimizer})}
        if run.is_leader:
            args.result.write_text(json.dumps(result))

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--bad", default="-1")
    parser.add_argument("--count", type=Path)
    parser.add_argument("--response", default="rollback")
    parser.add_argument("--then", default="stop")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--catch", action="store_true")
    parser.add_argument("--late", type=float, default=0.0)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--result", type=Path, required=True)
    main(parser.parse_args())
