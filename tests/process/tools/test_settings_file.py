"""A job takes its settings from `holdfast.toml`, as a user has it beside the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from holdfast.ckpt.checkpoints.catalog import committed_steps

DEADLINE_S = 200.0
SCRIPT = """
import torch
import holdfast

@holdfast.resilient(batch=holdfast.Batch(microbatches=2))
def train(run):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(4):
        for x in run.microbatches(torch.ones(2, 4)):
            run.backward(model(x).sum())
        run.step(optimizer)
    print("ranks", run.world_size, flush=True)

train()
"""
SETTINGS = """
[run]
nproc = 2
quiet = true

[checkpoint]    # the script has none
root = "checkpoints"
every = 2
"""


def test_a_script_is_run_as_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "holdfast.toml").write_text(SETTINGS)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.tools.cli", "run", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "HOLDFAST_RUN_MAX_ATTEMPTS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ranks 2\n" * 2
    assert done.stderr == (
        "holdfast: settings from ./holdfast.toml: run.nproc, run.quiet, checkpoint.root, "
        "checkpoint.every\n"
    )
    assert committed_steps(tmp_path / "checkpoints")[-1] == 4
