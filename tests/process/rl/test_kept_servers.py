"""Servers are workers of a job: one that is killed is started anew, and no answer is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import PATIENT, Event, launched
from session_imports import PRELOAD
from tree import ROOT

from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command
from holdfast.tools.chaos.hooks import GATE

WORKLOAD = ROOT / "tools/chaos/workloads/engines.py"
STEPS = 12

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(900)]


def is_ready(event: Event) -> bool:
    return bool(event["kind"] == "engine_ready")


def test_a_killed_server_is_replaced_and_its_answers_go_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    words = ["--meet", str(tmp_path / "meet"), "--steps", str(STEPS)]
    config = LaunchConfig(
        command=python_command(WORKLOAD, words),
        nodes=(
            NodeSpec(name="a", domain="a", slots={"trainer": 1, "rollout": 1}),
            NodeSpec(name="b", domain="b", slots={"rollout": 1}),
        ),
        wanted={"trainer": 1, "rollout": 2},
        run_dir=tmp_path / "run",
        env={GATE: str(gate)},  # its steps are slow until then
        timing=PATIENT,
        preload=PRELOAD,
    )
    with launched(config) as job:
        first = job.await_event(is_ready)
        job.await_step(2)
        os.killpg(int(first["group"]), signal.SIGKILL)
        seen = len(job.history)
        job.await_event(lambda e: is_ready(e) and e["seat"] == first["seat"], after=seen)
        gate.touch()
        assert job.finish().ok
    ends = [each["status"] for each in job.events("worker_exited") if each["seat"] == first["seat"]]
    assert "the server ended with killed by SIGKILL" in ends[0]
    assert max(each["step"] for each in job.events("step")) == STEPS
