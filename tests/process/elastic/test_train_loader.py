"""The data loading example of the docs: deaths of a rank and a reader do not change the result."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_scripts import ran
from jobs import Job, launched, trainers
from tree import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "train_loader.py"
EPOCHS = 8


def undisturbed(directory: Path, *flags: str) -> Any:
    """Return the result of a run alone, whose rank reads data by itself."""
    result = directory / "alone.json"
    words = [sys.executable, EXAMPLE, "--epochs", EPOCHS, "--workers", 0, "--result", result]
    ran([*words, *flags], check=True)
    return json.loads(result.read_text())


def readers(pid: int) -> list[int]:
    """Return the processes that read data for a rank: the children of its starter."""
    starters = [c for c in children(pid) if b"starter" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return [reader for starter in starters for reader in children(starter)]


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_a_rank_and_a_reader(running: Job) -> None:
    """SIGKILL one rank, and once the others go on without it, a process that reads data."""
    running.await_step(2)
    os.kill(running.worker("trainer/1"), signal.SIGKILL)
    running.generation(2)
    for pid in readers(running.worker("trainer/0")):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="indexed"),
        pytest.param(("--stream",), id="iterable", marks=pytest.mark.exhaustive),
    ],
)
def test_killed_ranks_and_killed_readers_leave_no_trace(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    result = tmp_path / "result.json"
    words = ["--epochs", str(EPOCHS), "--workers", "1", "--result", str(result), *flags]
    config = trainers(EXAMPLE, words, slots=2, run_dir=tmp_path / "run")
    with launched(config) as running:
        kill_a_rank_and_a_reader(running)
        assert running.finish().ok
    assert json.loads(result.read_text()) == undisturbed(tmp_path, *flags)
