"""A training script that takes very little time: `train_gpt.py` on a few numbers.

With ``--hold FILE`` every generation but the first waits before it restores until the file exists;
with ``--gate STEP FILE`` it waits once that step is complete. With ``--late FILE`` a worker that
starts after the first step waits at its start until the file exists. With ``--pace S`` a step takes
at least S seconds, with ``--until FILE`` only until the file exists: late events of a test then
still find the job at work. ``--ddp`` wraps the model.
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


def wait_for(file: Path, run: elastic.Run) -> None:
    """Wait, as long as the generation lasts, until the file is there."""
    while not file.exists():
        run.check()
        time.sleep(0.01)


def main(args: argparse.Namespace) -> None:
    """Train as the flags say."""
    torch.set_num_threads(1)
    training = args.late and args.late.with_suffix(".training")
    while args.late and training.exists() and not args.late.exists():
        time.sleep(0.01)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))

    @elastic.resilient(
        batch=elastic.Batch(microbatches=4, size=2),
        exact="int64" if args.int64 else "float32",
        seed=args.seed,
        checkpoint=args.checkpoint
        and elastic.Checkpoints(args.checkpoint, every=args.checkpoint_every),
        snapshots=elastic.Snapshots(parity=args.parity),
    )
    def train(run: elastic.Run) -> None:
        if run.generation > 1 and args.hold:
            wait_for(args.hold, run)
        layers = nn.Linear(8, args.width), nn.Dropout(0.1), nn.Linear(args.width, 1)
        model: nn.Module = nn.Sequential(*layers)
        if args.ddp:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        for step in run.steps(args.steps):
            if args.gate and step == int(args.gate[0]):
                wait_for(Path(args.gate[1]), run)
            for batch in run.microbatches(data):
                loss = (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()
                run.backward(loss)
                run.log(loss=loss)
            run.clip_grad_norm_(model.parameters(), 1.0)
            run.step(optimizer)
            schedule.step()
            if training:
                training.touch()
            if not (args.until and args.until.exists()):
                time.sleep(args.pace)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        result = {"hash": state_hash(state), "steps": run.completed, "loss": run.metrics["loss"]}
        if run.is_leader:
            Path(args.result).write_text(json.dumps(result))

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--result", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--checkpoint")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--int64", action="store_true")
    parser.add_argument("--parity", type=int, default=1)
    parser.add_argument("--hold", type=Path)
    parser.add_argument("--late", type=Path)
    parser.add_argument("--gate", nargs=2)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    main(parser.parse_args())
