"""A declared memory budget holds in real jobs: it is never exceeded, and too small is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

from jobs import PATIENT, PRELOAD, REMEMBERING, job, launched, trainers

import holdfast
from holdfast.ckpt.memory.arena import arena_path
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command

SNAPSHOTS = "[0-9]*"
"""The files of slots and parity rows in a node's directory."""

LARGEST = 1_000_000
STEPS = 40


def taken_bytes(directory: Path, *, pattern: str = "*") -> int:
    """Return the size of a node's files; files removed during the count may still be included."""
    total = 0
    with contextlib.suppress(FileNotFoundError):  # the directory goes with the job
        for path in directory.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


def test_a_growing_job_stays_within_its_budget(tmp_path: Path) -> None:
    budget, grow = 12 * LARGEST, LARGEST // STEPS
    flags = ("--steps", str(STEPS), "--bytes", "1000", "--grow", str(grow))
    with job(
        tmp_path,
        *flags,
        "--memory",
        str(budget),
        script=REMEMBERING,
        nodes=2,
        per_node=1,
    ) as running:
        directories = [arena_path(running.launcher.run, node) for node in ("n0", "n1")]
        peak, outcome = 0, None
        while outcome is None:
            peak = max(peak, *(taken_bytes(each) for each in directories))
            outcome = running.launcher.wait(0.001)
        assert outcome.ok, outcome.message
        assert 2 * LARGEST < peak <= budget


def test_a_budget_that_is_too_small_ends_the_job_with_one_clear_sentence(tmp_path: Path) -> None:
    with job(tmp_path, "--memory", "100000", script=REMEMBERING) as running:
        outcome = running.finish()
        assert not outcome.ok
        assert "100,000 bytes are declared for a node: declare more" in outcome.message
        assert len(running.events("proposed")) == 1


GROWING = """
import torch
from holdfast import elastic

class Log:
    "A record of losses that nobody bounded."
    def __init__(self): self.values = torch.zeros(1)
    def state_dict(self): return {"values": self.values}
    def load_state_dict(self, saved): self.values = saved["values"]

@elastic.resilient(snapshots=elastic.Snapshots(memory="1MiB"), batch=elastic.Batch(microbatches=2))
def train(run):
    model, log = torch.nn.Linear(4, 1), Log()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer, log=log)
    for step in run.steps(30):
        for _ in run.microbatches(torch.ones(8, 4)):
            run.backward(model(torch.ones(1, 4)).sum())
        run.step(optimizer)
        if step == 10:
            log.values = torch.zeros(4 << 20)

train()
"""


def test_a_state_that_outgrows_its_budget_costs_snapshots_and_not_the_training(
    tmp_path: Path,
) -> None:
    script = tmp_path / "growing.py"
    script.write_text(GROWING)
    nodes = tuple(NodeSpec(name=name, domain=name, slots={"trainer": 1}) for name in ("n0", "n1"))
    config = LaunchConfig(
        command=python_command(script, []),
        nodes=nodes,
        wanted={"trainer": len(nodes)},
        run_dir=tmp_path / "run",
        timing=PATIENT,
        preload=PRELOAD,
    )
    with launched(config) as running:
        outcome = running.finish()
        assert outcome.ok, outcome.message
        assert max(event["step"] for event in running.events("step")) == 30
        left_out = running.events("snapshots_left_out")
    assert left_out, "it is said, once and then ever more rarely"
    assert {event["newest"] for event in left_out} == {10}
    for event in left_out:
        assert "1,048,576 bytes are declared for a node: declare more" in event["reason"]
    assert len(left_out) <= 2 * len(nodes) * 3


STEADY = """
import torch
import holdfast

@holdfast.resilient(batch=holdfast.Batch(microbatches=3))
def train(run):
    model = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(30):
        for rows in run.microbatches(torch.ones(96, 1024)):
            run.backward(model(rows).square().mean())
        run.step(optimizer)

train()
"""
STATE_BYTES = 3 * 4 * 1024 * 1024
INDEX_BYTES = 64 << 10


def test_a_job_takes_the_memory_that_memory_need_tells(tmp_path: Path) -> None:
    script = tmp_path / "steady.py"
    script.write_text(STEADY)
    with launched(trainers(script, (), run_dir=tmp_path / "run", nodes=3)) as running:
        directories = [arena_path(running.launcher.run, f"n{number}") for number in range(3)]
        peak, outcome = 0, None
        while outcome is None:
            found = [taken_bytes(each, pattern=SNAPSHOTS) for each in directories]
            peak, outcome = max(peak, *found), running.launcher.wait(0.001)
        assert outcome.ok, outcome.message
    least = holdfast.memory_need(STATE_BYTES // 3, nodes=3)
    most = holdfast.memory_need(STATE_BYTES // 3 + INDEX_BYTES, nodes=3)
    assert least.total <= peak <= most.total + most.lent
