"""`holdfast status` for a running job, for an ended one, and without any job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from jobs import DEADLINE_S, REMEMBERING, job
from tree import ROOT


def status(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.tools.cli", "status", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        check=False,
    )


def nodes_of(run_dir: Path) -> dict[str, Any]:
    done = status(run_dir, "--json")
    assert done.returncode == 0, done.stderr
    nodes: dict[str, Any] = msgspec.json.decode(done.stdout)["nodes"]
    return nodes


def test_a_live_job_says_what_each_node_holds(tmp_path: Path) -> None:
    with job(tmp_path, script=REMEMBERING, nodes=2, per_node=1) as running:
        running.await_event(lambda e: e["kind"] == "step" and e["protected"] >= 3)
        nodes = nodes_of(tmp_path / "run")
        table, samples = status(tmp_path / "run"), status(tmp_path / "run", "--prometheus")
        pids = running.launcher.processes()
    assert list(nodes) == ["n0", "n1"]
    for name, node in nodes.items():
        assert (node["sidecar"], node["error"]) == (pids[name].sidecar, None)
        said = node["status"]
        assert said["protected"] >= 3
        assert 0 <= said["restore_point_age_s"] < DEADLINE_S
        assert {"seal", "exchange", "protect"} <= said["meters"].keys()
        assert said["bytes"]["slots"] > 0 < said["bytes"]["parity"]
    assert "newest restore point step" in table.stdout
    assert 'holdfast_protected_step{node="n1"} ' in samples.stdout


def test_watching_ends_with_the_job(tmp_path: Path) -> None:
    with job(tmp_path, script=REMEMBERING, nodes=2, per_node=1) as running:
        running.await_event(lambda e: e["kind"] == "step" and e["protected"] >= 1)
        words = [
            "-m",
            "holdfast.tools.cli",
            "status",
            str(tmp_path / "run"),
            "--watch",
            "0.1",
            "--json",
        ]
        watching = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
        )
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(3)]
    _, error = watching.communicate(timeout=DEADLINE_S)
    steps = [msgspec.json.decode(line)["nodes"]["n0"]["status"]["protected"] for line in lines]
    assert steps == sorted(steps)
    assert watching.returncode == 1
    assert error.startswith(b"error: ")


def test_a_job_that_is_over_is_an_error_with_its_ending(tmp_path: Path) -> None:
    with job(tmp_path, "--steps", "3", script=REMEMBERING, nodes=2, per_node=1) as running:
        assert running.finish().ok
    done = status(tmp_path / "run")
    assert done.returncode == 1
    assert "the job is over" in done.stderr


def test_no_directory_is_an_error_at_once(tmp_path: Path) -> None:
    done = status(tmp_path / "nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "no such directory" in done.stderr
