"""A model in the wrappings of PyTorch, in their common orders, loses a rank and keeps its bits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from forked_scripts import ran
from jobs import launched, trainers
from tree import HELPERS

SCRIPT = HELPERS / "wrapped_training.py"

WRAPPINGS = (
    "compile",
    "compile+functional",
    "compile(ddp)",
    "compile(ddp)+bfloat16+again",
    "ddp(compile)",
    "ddp(compile)+scaler",
    "ddp(compiled in place)+ema",
    "ddp+functional",
    "ddp+scaler+ema",
    "shard+again+bfloat16",
    "shard(compile(block))",
    "compile(shard(block))+again+bfloat16",
    "compile(shard)",
    "shard+scaler",
    "shard+ema",
    "shard(compile(block))+scaler+ema",
)


def cases() -> list[object]:
    """Return one quick case, and every wrapping with torch's own compiler for releases."""
    rest = [
        pytest.param(each, "inductor", marks=pytest.mark.exhaustive, id=each) for each in WRAPPINGS
    ]
    return [pytest.param("compile(ddp)", "aot_eager", id="quick"), *rest]


@pytest.mark.parametrize(("wrapping", "backend"), cases())
def test_a_wrapped_model_that_loses_a_rank_keeps_its_bits(
    wrapping: str, backend: str, tmp_path: Path
) -> None:
    alone, job = tmp_path / "alone", tmp_path / "job"
    ran(
        [sys.executable, SCRIPT, wrapping, backend, alone],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    config = trainers(
        SCRIPT, [wrapping, backend, str(job), "kill"], nodes=2, run_dir=tmp_path / "run"
    )
    with launched(config) as running:
        outcome = running.finish()
        assert outcome.ok, outcome.message
        assert any("SIGKILL" in each["status"] for each in running.events("worker_exited"))
    assert job.read_text() == alone.read_text()
