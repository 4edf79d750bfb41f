"""Frozen weights that FSDP2 shards, tied and quantised ones: lost machines change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from finished_jobs import finished, lose_in_turn
from jobs import Job

TREE = Path(__file__).parents[2]

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
from doubles.quantised import Quantised
from torch.distributed.fsdp import fully_shard
import holdfast

class Adapter(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.down = torch.nn.Linear(layer.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))

class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        integers = torch.randint(-9, 9, (1024, 1024), dtype=torch.int8)
        wrapped = Quantised(integers, torch.rand(1024), 32)
        self.weight = torch.nn.Parameter(wrapped, requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.integers * self.weight.scale[:, None])

@holdfast.resilient(batch=holdfast.Batch(microbatches=6, size=2), exact="float32")
def train(run):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)]
    base = [layers[0], layers[1], layers[0]]
    for layer in layers:
        layer.requires_grad_(False)
    table = Table()
    model = torch.nn.Sequential(*(Adapter(layer) for layer in base), torch.nn.Linear(1024, 8))
    fully_shard(model, mesh=run.data_mesh)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    run.track(model=model, table=table, optimizer=optimizer)
    data = torch.randn(96, 1024, generator=torch.Generator().manual_seed(1))
    for step in run.steps(40):
        for x in run.microbatches(data):
            run.backward(model(table(x)).square().mean())
        run.step(optimizer)
    parts = [each.full_tensor() for each in model.parameters()]
    if run.rank == 0:
        torch.save([*parts, table.weight.integers, table.weight.scale], sys.argv[1])

train()
"""


def lose_machines(running: Job) -> None:
    lose_in_turn(running, [(7, "n2"), (21, "n0")])


@pytest.mark.exhaustive
def test_frozen_shards_survive_lost_machines(tmp_path: Path) -> None:
    undisturbed, _ = finished(tmp_path / "undisturbed", SCRIPT, TREE)
    found, events = finished(tmp_path / "hurt", SCRIPT, TREE, hurts=lose_machines)
    assert len(found) == len(undisturbed) > 6
    assert all(map(torch.equal, found, undisturbed))
    assert "parity" in [event["tier"] for event in events if event["kind"] == "restored"]
