"""Optimizers whose update needs whole tensors give the same bits at every number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import DEADLINE_S, PATIENT, hurt, launched
from norm_bodies import KINDS, optimize_all
from ranks import ranks
from tree import HELPERS

from holdfast.elastic.launch.local import LaunchConfig, NodeSpec, python_command

SCRIPT = HELPERS / "whole_training.py"


def optimized(world_size: int, folder: Path) -> dict[str, Any]:
    with ranks(world_size, optimize_all, folder) as running:
        by_rank = running.results(timeout_s=250)
    found: dict[str, Any] = by_rank[0]
    assert all(each == found for each in by_rank)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of every optimizer on one rank."""
    return optimized(1, tmp_path_factory.mktemp("alone"))


def test_shards_do_not_show_in_the_weights_and_the_state(alone: dict[str, Any]) -> None:
    for kind in KINDS:
        assert alone[f"plain, {kind}"] == alone[f"fsdp2, {kind}"] == alone[f"hsdp, {kind}"]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_weights_are_those_of_one_rank(
    tmp_path: Path, alone: dict[str, Any], world_size: int
) -> None:
    for way, found in optimized(world_size, tmp_path).items():
        assert found == alone[way], way


def test_a_job_that_loses_a_worker_ends_as_one_process_does(tmp_path: Path) -> None:
    words = [SCRIPT, "--result", tmp_path / "alone.json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *map(str, words)], env=env, check=True, timeout=DEADLINE_S)
    go_on = tmp_path / "go"
    flags = ["--result", str(tmp_path / "job.json"), "--until", str(go_on)]
    config = LaunchConfig(
        command=python_command(SCRIPT, flags),
        nodes=tuple(NodeSpec(name=n, domain=n, slots={"trainer": 1}) for n in ("n0", "n1", "n2")),
        wanted={"trainer": 3},
        run_dir=tmp_path / "run",
        timing=PATIENT,
    )
    with launched(config) as job:
        job.await_step(4)
        hurt(job.worker("trainer/1"))
        job.generation(2)
        go_on.touch()
        outcome = job.finish()
        assert outcome.ok, outcome.message
    alone, found = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("alone", "job"))
    assert found == alone
