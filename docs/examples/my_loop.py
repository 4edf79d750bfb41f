"""A small training loop that reports its samples and its state to `holdfast chaos`.

Run it with ``holdfast run --nproc 2 my_loop.py``; test_my_loop.py beside it tests it under faults.
"""

import argparse
import time

import torch
from torch import nn

import holdfast
from holdfast import chaos


class Points:
    """Sample i is a number and its square."""

    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        x = torch.tensor([i / 100_000])
        return i, x, x * x


def main(args):
    @holdfast.resilient(batch=holdfast.Batch(microbatches=6, size=4), exact=True)
    def train(run):
        model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(args.steps):
            seen = set()
            for ids, x, y in run.microbatches(Points()):
                run.backward((model(x) - y).square().mean())
                seen.update(ids.tolist())
            run.step(optimizer)
            position = {"rank": run.rank, "attempt": run.generation}
            chaos.samples(step + 1, sorted(seen), **position)  # a step number counts complete steps
            chaos.state_hash(step + 1, model.state_dict(), **position)
            time.sleep(args.step_s)

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-s", type=float, default=0.0, help="least duration of a step")
    torch.set_num_threads(1)
    main(parser.parse_args())
