"""The training job of a soak: a small model with frozen parts, until it is told its last step."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
from pathlib import Path

import torch
from torch import nn

from holdfast import elastic
from holdfast.ckpt.state.hashing import state_hash

FOREVER = 10**9
MANY = 10**6
"""Failed checkpoints in a row that do not end the job: its disks fail on purpose."""


def dump_stacks(record: logging.LogRecord) -> bool:
    """Print the stacks of all threads with each warning about a stuck thread."""
    if "still busy" in record.getMessage():
        faulthandler.dump_traceback()
    return True


def main(args: argparse.Namespace) -> None:
    """Train until the step in the file ``--end``, once it exists; then write the hash."""
    logging.getLogger("holdfast.ckpt.snapshot.snapshotter").addFilter(dump_stacks)
    torch.set_num_threads(1)
    data = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    end = Path(args.end)

    @elastic.resilient(
        batch=elastic.Batch(microbatches=6, size=2),
        exact="float32",
        snapshots=elastic.Snapshots(parity=args.parity, disk=args.disk),
        checkpoint=args.checkpoint
        and elastic.Checkpoints(
            args.checkpoint,
            incremental=args.incremental,
            every=args.checkpoint_every,
            failures_allowed=MANY,
        ),
    )
    def train(run: elastic.Run) -> None:
        model = nn.Sequential(nn.Linear(32, args.width), nn.Dropout(0.1), nn.Linear(args.width, 1))
        frozen = nn.Embedding(args.width, 256).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.track(model=model, frozen=frozen, optimizer=optimizer)
        for step in run.steps(FOREVER):
            for batch in run.microbatches(data):
                run.backward((model(batch).squeeze(-1) - batch.sum(-1)).square().mean())
            run.step(optimizer)
            if end.exists() and step + 1 >= int(end.read_text()):
                break
        found = state_hash({"model": model, "frozen": frozen, "optimizer": optimizer})
        if run.is_leader:
            Path(args.result).write_text(json.dumps({"hash": found, "steps": step + 1}))

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--end", required=True)
    parser.add_argument("--result", required=True)
    parser.add_argument("--checkpoint")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--incremental", action="store_true")
    parser.add_argument("--parity", type=int, default=1)
    parser.add_argument("--disk")
    parser.add_argument("--width", type=int, default=512)
    main(parser.parse_args())
