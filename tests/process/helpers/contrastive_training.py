"""A contrastive training in two passes, with noise of the run's; it waits for ``--until``."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from own_calls_bodies import DATA, contrast, views
from torch import nn

import holdfast
from holdfast.ckpt.state.hashing import state_hash

MICROBATCHES = 5


def main(result: Path, until: Path | None) -> None:
    """Train and write the hash of the state."""
    torch.set_num_threads(1)

    @holdfast.resilient(
        batch=holdfast.Batch(microbatches=MICROBATCHES, size=2), exact="float32", seed=4
    )
    def train(run: holdfast.Run) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        noise = run.generator("noise")
        for step in run.steps(8):
            while step == 4 and until is not None and not until.exists():
                run.check()
                time.sleep(0.02)
            with torch.no_grad():
                kept = [views(model, noisy(x, noise)) for x in run.microbatches(DATA)]
            z = run.gather(kept).requires_grad_()
            (g,) = torch.autograd.grad(contrast(z), z)
            for x in run.microbatches(DATA):
                seen = views(model, noisy(x, noise)) * g[run.microbatch]
                run.backward(seen.sum() * MICROBATCHES)
            run.step(optimizer)
        found = state_hash({"model": model, "optimizer": optimizer})
        if run.is_leader:
            result.write_text(json.dumps(found))

    train()


def noisy(x: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Return samples with some noise of the run's."""
    return x + 0.1 * torch.randn(x.shape, generator=noise)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--until", type=Path)
    args = parser.parse_args()
    main(args.result, args.until)
