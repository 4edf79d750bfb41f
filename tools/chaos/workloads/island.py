"""A small island that reports its samples, its state, and its weights at the end.

    holdfast run --island oslo --sea runs/sea tools/chaos/workloads/island.py --first runs/first

A step takes at least ``--pace`` seconds, and a whole second as long as fewer than ``--members``
islands have shown themselves at ``--meet``: one that is to join finds the others at work.
"""

from __future__ import annotations

import argparse
import fcntl
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast import elastic
from holdfast.elastic.events import UserEvent
from holdfast.tools import chaos
from holdfast.tools.chaos.workloads.told import numbered_rows, train_step

ALONE_S = 1.0  # shortest step while islands are missing
KEPT_ROUNDS = 64  # payloads stay until the end, for a replay of all merges


def build() -> nn.Module:
    """Return the model, the same on every island."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 16), nn.Linear(16, 1))


def keep_first(folder: Path) -> None:
    """Keep the first weights, for a replay: one process does it, or its successor if it dies."""
    folder.mkdir(exist_ok=True)
    with (folder.parent / "first.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("step-*/manifest.json")):
            holdfast.save(folder, {"model": build()}, step=0)


def main(args: argparse.Namespace) -> None:
    """Train with the options of the command line."""
    torch.set_num_threads(1)
    keep_first(Path(args.first))
    data = numbered_rows()

    @elastic.resilient(
        batch=elastic.Batch(microbatches=4, size=2),
        exact="float32",
        checkpoint=args.checkpoint
        and elastic.Checkpoints(args.checkpoint, every=args.checkpoint_every),
        islands=holdfast.Islands(
            every=8,
            portions=2,
            overlap=2,
            wait=holdfast.Quorum(args.quorum, grace_s=1.0) if args.quorum else "all",
            patience_s=args.patience,
            founders=args.founders,
            age_limit=KEPT_ROUNDS,
        ),
    )
    def train(run: elastic.Run) -> None:
        model = build()
        if args.fsdp:
            fully_shard(model, mesh=run.data_mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        signs = Path(args.meet, "alive")
        for step in run.steps(args.steps):
            line = {"rank": run.rank, "attempt": run.generation}
            train_step(run, model, optimizer, data, step=step, **line)
            state = holdfast.state_hash({"model": model, "optimizer": optimizer})
            chaos.state_hash(step + 1, state, **line)  # at every number of ranks the same
            time.sleep(args.pace if len(list(signs.glob("*.json"))) >= args.members else ALONE_S)
        weights = holdfast.state_hash({"model": model})
        run.emit(UserEvent(name="ended", fields={"weights": weights}))

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--founders", type=int, default=1)
    parser.add_argument("--patience", type=float, default=600.0)
    parser.add_argument("--quorum", type=float, default=0.0)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--meet", default="", help="the folder in which the islands meet")
    parser.add_argument("--first", required=True, help="folder for the first weights")
    parser.add_argument("--checkpoint")
    parser.add_argument("--checkpoint-every", type=int, default=5)
    main(parser.parse_args())
