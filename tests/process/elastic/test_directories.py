"""The directories of a script: those of where it began, although it changes its own later."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
from forked_scripts import ran

from holdfast.elastic.loop.trace.records import TRACE_ENV, TraceSettings

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import holdfast

disk = Path("spilled").absolute()
torch.set_num_threads(1)


def has_spilled():
    return any(json.loads(file.read_text())["step"] for file in disk.rglob("*.json"))


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=2), snapshots=holdfast.Snapshots(disk="spilled", disk_every=1)
)
def train(run):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    restored = run.completed
    for step in run.steps(restored + 2):
        for _ in run.microbatches():
            run.backward(model(torch.ones(1, 2)).sum())
        run.step(optimizer)
        while not restored and step and not has_spilled():
            time.sleep(0.02)
    return restored


os.chdir(sys.argv[1])  # as Hydra does, to a directory of this start
print(json.dumps(train()))
"""


def _start(home: Path, elsewhere: Path) -> int:
    """Run the script from ``home``; return the number of steps that it restored."""
    elsewhere.mkdir()
    script = home / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(elsewhere)]
    said = ran(words, cwd=home, check=True)
    assert list(elsewhere.iterdir()) == []
    found: int = json.loads(said.stdout)
    return found


def test_the_disk_of_snapshots_is_below_the_directory_in_which_the_script_began(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    assert _start(home, tmp_path / "first") == 0
    assert any((home / "spilled").rglob("*.json"))
    assert _start(home, tmp_path / "second") > 0


STAGES = """
import torch
import holdfast

torch.set_num_threads(1)


def stage(root, start):
    @holdfast.resilient(batch=holdfast.Batch(microbatches=1), checkpoint=root)
    def train(run):
        model = torch.nn.Linear(2, 1)
        if start:
            holdfast.load(start, {"model": model}, select="model.*")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        for _ in run.steps(5):
            for _ in run.microbatches():
                run.backward(model(torch.ones(1, 2)).sum())
            run.step(optimizer)

    train()


stage("runs/first", "")
stage("runs/second", "runs/first")
"""
"""One function in two stages, of which the second begins with the checkpoint of the first."""


def test_the_stages_of_a_checked_script_leave_its_own_checkpoints_alone(tmp_path: Path) -> None:
    script, apart = tmp_path / "train.py", tmp_path / "apart"
    script.write_text(STAGES)
    (trace := tmp_path / "trace").mkdir()
    order = TraceSettings(folder=str(trace), steps=2, roots=str(apart))
    environment = {**os.environ, TRACE_ENV: msgspec.json.encode(order).decode()}
    words = [sys.executable, str(script)]
    ran(words, cwd=tmp_path, env=environment, check=True)
    assert not (tmp_path / "runs").exists()
    assert len(list(apart.glob("*/step-000000000002"))) == 2
