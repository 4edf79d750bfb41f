"""A loop started by hand and one under ``holdfast run`` that loses a worker end with equal bits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from catalogue import LOOPS, Loop
from cluster import state_of
from forked_scripts import ran
from jobs import launched, trainers

SCRIPT = Path(__file__).with_name("run_loop.py")
ALWAYS = ("ppo",)
"""The loop of every test run: one with several phases and state of its own."""


def cases() -> list[object]:
    rest = pytest.mark.exhaustive
    return [
        pytest.param(loop, id=loop.name, marks=() if loop.name in ALWAYS else rest)
        for loop in LOOPS
        if not loop.is_per_rank
    ]


@pytest.mark.parametrize("loop", cases())
def test_a_job_that_loses_a_worker_ends_as_the_script_started_by_hand(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    alone, job = tmp_path / "alone", tmp_path / "job"
    alone.mkdir()
    job.mkdir()
    words = [sys.executable, SCRIPT, loop.name, alone]
    ran(words, check=True)
    config = trainers(
        SCRIPT, [loop.name, str(job), "--kill", "3", "3"], nodes=2, run_dir=tmp_path / "run"
    )
    with launched(config) as running:
        outcome = running.finish()
        assert outcome.ok, outcome.message
    assert (job / "died").exists()
    assert state_of(job) == state_of(alone)
