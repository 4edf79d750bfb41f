"""Ray places the nodes of a job: it drains, loses and adds them, and the weights are the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from document_blocks import blocks
from etcd_fixtures import Connect, StartCluster
from programs import Run
from tree import HELPERS
from undisturbed import WAITING, alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

DRILLS = Path(__file__).with_name("ray_drills.py")
TRAINING = HELPERS / "tiny_training.py"
DEADLINE_S = 300.0
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "ray.md"


def drill(run: Run, folder: Path, name: str, *more: str, script: Path = WAITING) -> dict[str, Any]:
    said = run("python", str(DRILLS), name, str(folder), str(script), *more, cwd=folder)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def test_nodes_are_drained_lost_and_added_and_the_weights_are_those_of_a_quiet_run(
    ray_cluster: Run, tmp_path: Path
) -> None:
    report = drill(ray_cluster, tmp_path, "drained_and_killed", script=TRAINING)
    assert report["status"] == 0, report["output"]
    assert len(report["handed_over"]) == 1, "the drained node gave its state away before it ended"
    assert report["handed_over"][0] in report["restored"], "and its last step was not lost"
    assert "left after a notice" in report["exits"]
    assert report["left"] == []
    quiet = tmp_path / "quiet.json"
    words = ("--result", str(quiet), "--steps", str(report["result"]["steps"]))
    subprocess.run([sys.executable, str(TRAINING), *words], check=True, timeout=DEADLINE_S)
    assert report["result"]["hash"] == json.loads(quiet.read_text())["hash"]


def test_other_ends_leave_nothing_behind(ray_cluster: Run, tmp_path: Path) -> None:
    report = drill(ray_cluster, tmp_path, "other_ends")
    status, said = report["absent"]
    assert status == 2
    assert "absent.py: no such script; give RayOptions(working_dir=...)" in said
    status, said = report["failed"]
    assert status == 1
    assert "the job on Ray failed: trainer/" in said
    assert "exit status 3; see its output" in said
    assert "about to fail" in said.partition("the job on Ray failed")[2], "the log comes back"
    assert "Traceback" not in said
    assert report["stopped"] == [128 + signal.SIGTERM, []]
    assert report["killed"] == []


def test_a_job_survives_its_actor_its_coordinator_and_rays_control_service(
    ray_cluster: Run, tmp_path: Path
) -> None:
    report = drill(ray_cluster, tmp_path, "parts_killed")
    assert report["status"] == 0, report["output"]
    assert report["done"] == [alone()] * 2
    assert report["left"] == []


def test_nodes_without_holdfast_are_told_to_have_it(ray_cluster: Run, tmp_path: Path) -> None:
    report = drill(ray_cluster, tmp_path, "without_holdfast")
    assert report["status"] == 1
    assert "No module named 'holdfast'" in report["said"]
    assert "Holdfast must be installed on all nodes" in report["said"]
    assert report["left"] == []


def test_without_the_head_of_the_cluster_all_of_a_job_ends(
    ray_cluster: Run, tmp_path: Path
) -> None:
    report = drill(ray_cluster, tmp_path, "head_lost")
    assert report["status"] != 0
    assert report["left"] == []


def test_no_node_has_two_parts(ray_cluster: Run, tmp_path: Path) -> None:
    report = drill(ray_cluster, tmp_path, "one_wide_node")
    assert report["status"] == 0
    assert report["done"] == [alone()] * 2
    assert len(report["nodes"]) == report["parts"] == 2


def test_with_etcd_nothing_of_the_job_is_left_there(
    ray_cluster: Run, tmp_path: Path, start_etcd: StartCluster, connect_etcd: Connect
) -> None:
    url = start_etcd(1).url
    report = drill(ray_cluster, tmp_path, "with_etcd", url)
    assert report["status"] == 0
    assert report["done"] == [alone()]
    assert report["left"] == []
    assert connect_etcd(url).range("")[0] == []


def test_the_script_of_the_guide_runs(ray_cluster: Run, tmp_path: Path) -> None:
    train, submit = blocks(GUIDE, "python")
    (tmp_path / "train.py").write_text(train)
    (tmp_path / "submit.py").write_text(submit)
    said = ray_cluster("python", str(DRILLS), "guide", str(tmp_path), "submit.py", cwd=tmp_path)
    report = json.loads(said.splitlines()[-1])
    assert report["status"] == 0
    assert "the job is done" in report["said"]
