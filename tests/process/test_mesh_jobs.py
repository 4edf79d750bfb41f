"""Whole jobs on meshes of two axes lose workers and machines, and train the same as without."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import mesh_bodies
import pipeline_bodies
import pytest
from jobs import hurt, job
from ranks import ranks

from elastic.config import Mesh
from elastic.records import MeshSize

SCRIPT = Path(__file__).with_name("mesh_training.py")
STEPS = 9


def undisturbed(folder: Path, *, tp: int, exact: bool) -> dict[str, Any]:
    """Return what one group comes to that nothing happens to."""
    turn: mesh_bodies.Turn = (MeshSize(tp=tp), Mesh(tp=tp), ["fsdp_tp"], exact)
    body = functools.partial(mesh_bodies.train_in_turn, turns=[turn], steps=STEPS)
    with ranks(tp, body, folder, with_world=False) as running:
        found: dict[str, Any] = running.results()[0][0]
    return found


def test_a_group_that_lost_a_worker_leaves_and_comes_back_without_a_trace(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    flags = ("--result", str(result), "--exact", "--steps", str(STEPS), "--then", "6")
    with job(tmp_path, *flags, nodes=2, per_node=2, script=SCRIPT) as running:
        running.await_event(lambda e: e["kind"] == "held")
        before = {seat: running.worker(seat) for seat in map("trainer/{}".format, range(4))}
        hurt(before["trainer/2"])
        smaller = running.world_of(2)
        assert (
            "mesh dp 1 × tp 2, 1 groups of 2 ranks, 1 of 1 groups within a node"
            in (smaller["reason"])
        )
        whole = running.world_of(4, after=running.history.index(smaller))
        assert running.finish().ok
        reformed = [e for e in running.events("reformed") if e["generation"] == whole["generation"]]
        restored = running.events("restored")
    assert len(reformed) == 4
    assert {e["tier"] for e in restored if e["generation"] > 1} <= {"arena", "peer"}
    pids = {event["pid"] for event in running.events("worker_started")}
    assert len(pids) == 5, "one worker was replaced, the others went on in their processes"
    found = json.loads(result.read_text())
    assert found["mesh"] == [2, 2]
    wanted = undisturbed(tmp_path, tp=2, exact=True)
    assert found["hash"] == wanted["hash"]
    assert found["losses"] == wanted["losses"][-len(found["losses"]) :]


def test_a_lost_machine_halves_what_tensor_parallelism_spreads_over(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    flags = ("--result", str(result), "--tp", "4,2", "--steps", str(STEPS))
    with job(tmp_path, *flags, nodes=2, per_node=2, script=SCRIPT) as running:
        running.await_event(lambda e: e["kind"] == "held")
        assert "mesh dp 1 × tp 4" in running.events("proposed")[0]["reason"]
        running.launcher.lose_machine("n1")
        smaller = running.world_of(2)
        assert "mesh dp 1 × tp 2" in smaller["reason"]
        assert smaller["restore_how"] == "parity"
        assert running.finish().ok
    found = json.loads(result.read_text())
    assert found["mesh"] == [1, 2]
    wanted = undisturbed(tmp_path, tp=2, exact=False)
    assert found["seen"] == wanted["seen"][-len(found["seen"]) :], "the same samples"
    assert found["losses"] == pytest.approx(wanted["losses"][-len(found["losses"]) :], rel=1e-5)
    for name, values in wanted["weights"].items():
        assert found["weights"][name] == pytest.approx(values, abs=1e-4), name


def test_a_lost_machine_takes_a_pipeline_along_and_the_other_trains_it_all(tmp_path: Path) -> None:
    result, kind = tmp_path / "result.json", "fsdp 1f1b dropout"
    flags = ("--result", str(result), "--tp", "1", "--pp", "2", "--kind", kind, "--exact")
    flags = (*flags, "--steps", str(STEPS))
    with job(tmp_path, *flags, nodes=2, per_node=2, script=SCRIPT) as running:
        running.await_event(lambda e: e["kind"] == "held")
        assert "mesh dp 2 × pp 2" in running.events("proposed")[0]["reason"]
        running.launcher.lose_machine("n1")
        assert running.world_of(2)["restore_how"] == "parity"
        assert running.finish().ok
    found = json.loads(result.read_text())
    turn: pipeline_bodies.Turn = (MeshSize(pp=2), Mesh(pp=2), [kind])
    body = functools.partial(pipeline_bodies.train_in_turn, turns=[turn], steps=STEPS)
    with ranks(2, body, tmp_path, with_world=False) as alone:
        wanted = alone.results()[0][0]
    assert found["weights"] == wanted["weights"], "of the first stage"
    assert found["losses"] == wanted["losses"][-len(found["losses"]) :]
