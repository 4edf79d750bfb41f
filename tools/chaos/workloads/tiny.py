"""A small Holdfast training job that reports its samples and its state.

    holdfast run --nproc 2 tools/chaos/workloads/tiny.py --steps 60

A step takes at least ``--pace`` seconds, and a whole second with fewer than ``--ranks`` ranks: a
node that is to join then finds the job still at work, however long it takes to start. It also takes
a second until the file is there that `hooks.GATE` names. Holdfast's own events report the steps.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

from holdfast import elastic
from holdfast.tools import chaos
from holdfast.tools.chaos.hooks import GATE
from holdfast.tools.chaos.workloads.told import numbered_rows, train_step

MICROBATCHES, SIZE = 6, 2
SHORT_HANDED_S = 1.0  # shortest step while ranks are missing


def main(args: argparse.Namespace) -> None:
    """Train with the options of the command line."""
    torch.set_num_threads(1)
    gate = os.environ.get(GATE, "")
    data = numbered_rows()

    @elastic.resilient(
        batch=elastic.Batch(microbatches=MICROBATCHES, size=SIZE),
        exact="float32",
        snapshots=elastic.Snapshots(parity=args.parity),
        checkpoint=args.checkpoint
        and elastic.Checkpoints(args.checkpoint, every=args.checkpoint_every),
    )
    def train(run: elastic.Run) -> None:
        model = nn.Sequential(nn.Linear(8, args.width), nn.Dropout(0.1), nn.Linear(args.width, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(args.steps):
            line = {"rank": run.rank, "attempt": run.generation}
            train_step(run, model, optimizer, data, step=step, **line)
            if args.tell_steps:
                chaos.step(step + 1, **line)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            chaos.state_hash(step + 1, state, **line)
            fast = run.world_size >= args.ranks and (not gate or Path(gate).exists())
            time.sleep(args.pace if fast else SHORT_HANDED_S)

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--width", type=int, default=16, help="120 bytes of state for each")
    parser.add_argument("--parity", type=int, default=1)
    parser.add_argument("--tell-steps", action="store_true", help="to a job that is not watched")
    parser.add_argument("--checkpoint")
    parser.add_argument("--checkpoint-every", type=int, default=20)
    main(parser.parse_args())
