"""Frozen weights that the function builds again: they lie nowhere, and a wrong one is refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from finished_jobs import NODES, finished
from jobs import Job, launched, trainers

from holdfast.ckpt.memory.arena import arena_path

TREE = Path(__file__).parents[2]

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
from doubles.quantised import Quantised
from torch.distributed.fsdp import fully_shard
import holdfast

class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        integers = torch.randint(-9, 9, (512, 512), dtype=torch.int8)
        wrapped = Quantised(integers, torch.rand(512), 32)
        self.weight = torch.nn.Parameter(wrapped, requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.integers * self.weight.scale[:, None])

@holdfast.resilient(batch=holdfast.Batch(microbatches=6, size=2), exact="float32")
def train(run):
    torch.manual_seed(0)
    base = torch.nn.Linear(512, 1024, bias=False).requires_grad_(False)
    late = torch.nn.Linear(1024, 512, bias=False).requires_grad_(False)
    model = torch.nn.Sequential(base, late, torch.nn.Linear(512, 8))
    table = Table()
    fully_shard(model, mesh=run.data_mesh)
    optimizer = torch.optim.AdamW([*late.parameters(), *model[2].parameters()], lr=1e-3)
    run.track(model=holdfast.Rebuilt(model), table=holdfast.Rebuilt(table), optimizer=optimizer)
    data = torch.randn(96, 512, generator=torch.Generator().manual_seed(1))
    for step in run.steps(150):
        late.requires_grad_(step >= 50)
        for x in run.microbatches(data):
            run.backward(model(table(x)).square().mean())
        run.step(optimizer)
        if step == 80:
            run.fence()
            with torch.no_grad():
                base.weight.mul_(0.5)
    parts = [each.full_tensor() for each in model.parameters()]
    if run.rank == 0:
        torch.save([*parts, table.weight.integers, table.weight.scale], sys.argv[1])

train()
"""
FROZEN_BYTES = 2 * 512 * 1024 * 4 + 512 * 512


def held_bytes(running: Job) -> int:
    """Return the bytes of all nodes' slots and parity in shared memory."""
    paths = [arena_path(running.launcher.run, node) for node in NODES]
    return sum(file.stat().st_size for path in paths for file in path.glob("[0-9a-f]*.*"))


def hurt(running: Job) -> None:
    running.await_step(8)
    assert held_bytes(running) < FROZEN_BYTES // 2
    for step, lost in ((9, "trainer/1"), (30, "n2"), (60, "trainer/1"), (95, "n1")):
        running.await_step(step)
        next_one = len(running.events("proposed")) + 1
        if lost.startswith("trainer"):
            os.kill(running.worker(lost), signal.SIGKILL)
        else:
            assert running.launcher.lose_machine(lost)
        running.generation(next_one)


def test_a_job_that_builds_its_frozen_weights_again_ends_as_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    undisturbed, _ = finished(tmp_path / "undisturbed", SCRIPT, TREE)
    found, events = finished(tmp_path / "hurt", SCRIPT, TREE, hurts=hurt)
    assert all(map(torch.equal, found, undisturbed))
    restored = [event for event in events if event["kind"] == "restored"]
    assert {event["tier"] for event in restored} >= {"none", "parity"}
    assert all(event["bytes"] < FROZEN_BYTES // 2 for event in restored if event["step"] < 50)


WRONG = """
import torch
import holdfast

@holdfast.resilient(batch=holdfast.Batch(microbatches=2, size=2))
def train(run):
    torch.manual_seed(SEED)
    base = torch.nn.Linear(64, 64).requires_grad_(False)
    head = torch.nn.Linear(64, 8)
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-3)
    run.track(base=holdfast.Rebuilt(base), head=head, optimizer=optimizer)
    data = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    for step in run.steps(100_000):
        for x in run.microbatches(data):
            run.backward(head(base(x)).square().mean())
        run.step(optimizer)
        ACT

train()
"""


@pytest.mark.parametrize(
    ("seed", "act", "said"),
    [
        ("run.generation", "pass", "base.weight was built as float32 [64, 64] with the digest"),
        ("run.rank", "pass", "have built different contents"),
        (
            "0",
            "if step == 5: base.weight.data.numpy()[3] += 1",
            "was written to in a way that torch does not count",
        ),
    ],
)
def test_other_weights_are_refused_by_name(tmp_path: Path, seed: str, act: str, said: str) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG.replace("SEED", seed).replace("ACT", act))
    with launched(trainers(script, (), run_dir=tmp_path / "run", nodes=2)) as running:
        if seed == "run.generation":
            running.await_step(5)
            os.kill(running.worker("trainer/1"), signal.SIGKILL)
        outcome = running.finish()
    assert not outcome.ok
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert said in logs + outcome.message
