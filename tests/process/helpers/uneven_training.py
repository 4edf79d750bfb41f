"""A training script with one slow rank: ``--slow SEAT`` takes longer for each microbatch."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from holdfast import elastic
from holdfast.ckpt.state.hashing import state_hash
from holdfast.elastic.channel.connecting import connect

STEPS, MICROBATCHES = 36, 8
SLOW_S, USUAL_S = 0.1, 0.005


def main(args: argparse.Namespace) -> None:
    """Train as the flags say."""
    torch.set_num_threads(1)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    takes_s = 0.0
    if args.slow:
        takes_s = SLOW_S if connect().seat == args.slow else USUAL_S

    @elastic.resilient(batch=elastic.Batch(microbatches=MICROBATCHES, size=2), exact="float32")
    def train(run: elastic.Run) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(STEPS):
            for batch in run.microbatches(data):
                time.sleep(takes_s)
                run.backward((model(batch).squeeze(-1) - batch.sum(-1)).square().mean())
            run.step(optimizer)
        result = {"hash": state_hash({"model": model, "optimizer": optimizer})}
        if run.is_leader:
            args.result.write_text(json.dumps(result))

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--slow")
    main(parser.parse_args())
