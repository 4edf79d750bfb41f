"""A training whose norms, embeddings and optimizers depend on more than a rank's own part.

Rank 0 writes the digest of the state to ``--result``. Later steps wait for the file ``--until``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast

STEPS = 30


class Net(nn.Module):
    """A plain table with sparse gradients, and sharded layers with norms."""

    def __init__(self, run: holdfast.Run) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, sparse=True)
        body: Any = nn.Sequential(
            nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 1)
        )
        self.body = fully_shard(body, mesh=run.mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(x)).squeeze(1)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--until", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)

    @holdfast.resilient(batch=holdfast.Batch(microbatches=5, size=4), exact="float32")
    def train(run: holdfast.Run) -> None:
        net = Net(run)
        layers: Any = net.body
        muon = torch.optim.Muon([layers[0].weight], lr=0.01)
        factored = torch.optim.Adafactor([layers[3].weight, layers[4].weight], lr=0.01)
        sparse = torch.optim.SparseAdam(net.table.parameters(), lr=0.01)
        rest = torch.optim.AdamW([p for p in layers.parameters() if p.ndim == 1], lr=0.01)
        state: dict[str, Any] = {
            "net": net, "muon": muon, "factored": factored, "sparse": sparse, "rest": rest
        }  # fmt: skip
        run.track(**state)
        data = torch.randint(0, 9, (200,), generator=torch.Generator().manual_seed(0))
        for step in run.steps(STEPS):
            for x in run.microbatches(data):
                loss = (net(x) - x / 9).square().mean()
                run.backward(loss)
                run.log(loss=loss)
            run.step(muon, factored, sparse, rest)
            while step >= STEPS // 2 and args.until is not None and not args.until.exists():
                run.check()
                time.sleep(0.02)
        digest = holdfast.state_hash(state)
        if run.is_leader:
            args.result.write_text(json.dumps({"digest": digest, "loss": run.metrics["loss"]}))

    train()


if __name__ == "__main__":
    main()
