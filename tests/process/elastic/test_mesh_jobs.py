"""Whole jobs on two-axis meshes lose workers and machines, and train the same as without losses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pipeline_bodies
import pytest
from jobs import Event, Job, hurt, job
from mesh_bodies import Turn, all_ranks
from tree import HELPERS

from holdfast.elastic.config import Mesh
from holdfast.elastic.membership.records import MeshSize

SCRIPT = HELPERS / "mesh_training.py"
STEPS = 9


@contextmanager
def training(folder: Path, *flags: str) -> Iterator[Job]:
    """Run four workers on two nodes, which stand still when the first steps are protected."""
    (folder / "results").mkdir()
    flags = ("--results", str(folder / "results"), "--steps", str(STEPS), *flags)
    with job(folder, *flags, nodes=2, per_node=2, script=SCRIPT) as running:
        running.await_event(lambda e: e["kind"] == "held")
        yield running


def results(folder: Path) -> list[dict[str, Any]]:
    """Return what every rank of the last generation came to, in the order of ranks."""
    files = sorted((folder / "results").iterdir())
    return [json.loads(file.read_text()) for file in files]


def undisturbed(turn: Turn, folder: Path) -> dict[str, Any]:
    """Return what one group comes to that nothing happens to."""
    return all_ranks([turn], folder, steps=STEPS)[0][0]


def lose_a_worker(running: Job, *, left: int) -> Event:
    """Kill one of four workers; return when all are back what said that ``left`` go on.

    All that is restored comes from memory, into the processes that were there.
    """
    hurt(running.worker("trainer/2"))
    smaller = running.world_of(left)
    whole = running.world_of(4, after=running.history.index(smaller))
    assert running.finish().ok
    reformed = [e for e in running.events("reformed") if e["generation"] == whole["generation"]]
    assert len(reformed) == 4
    restored = [e for e in running.events("restored") if e["generation"] > 1]
    assert {event["tier"] for event in restored} <= {"arena", "prefetched", "peer"}
    pids = {event["pid"] for event in running.events("worker_started")}
    assert len(pids) == 5, "one worker was replaced, the others went on in their processes"
    return smaller


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [(), ("--large",)])
def test_a_group_that_lost_a_worker_leaves_and_comes_back_without_a_trace(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    flags = ("--tp", "2", "--kind", "fsdp_tp", "--exact", "--then", "6", *more)
    with training(tmp_path, *flags) as running:
        smaller = lose_a_worker(running, left=2)
    mesh = "mesh dp 1 × tp 2, 1 groups of 2 ranks, 1 of 1 groups within a node"
    assert mesh in smaller["reason"]
    found = results(tmp_path)[0]
    assert found["mesh"] == [2, 2]
    wanted = undisturbed((MeshSize(tp=2), Mesh(tp=2), ["fsdp_tp"], "float32"), tmp_path)
    assert found["hash"] == wanted["hash"]
    assert found["losses"] == wanted["losses"][-len(found["losses"]) :]


@pytest.mark.exhaustive
def test_a_replica_of_shards_leaves_and_comes_back_without_a_trace(tmp_path: Path) -> None:
    flags = ("--shard", "2", "--kind", "hsdp", "--exact", "--then", "6")
    with training(tmp_path, *flags) as running:
        smaller = lose_a_worker(running, left=2)
    assert "mesh dp 2 (replicate 1 × shard 2)" in smaller["reason"]
    found = results(tmp_path)[0]
    assert found["mesh"] == [2, 2]
    wanted = undisturbed((MeshSize(), Mesh(), ["fsdp"], "float32"), tmp_path)
    assert found["hash"] == wanted["hash"]
    assert found["losses"] == wanted["losses"][-len(found["losses"]) :]


def test_a_lost_machine_halves_what_tensor_parallelism_spreads_over(tmp_path: Path) -> None:
    with training(tmp_path, "--tp", "4,2", "--kind", "fsdp_tp") as running:
        assert "mesh dp 1 × tp 4" in running.events("proposed")[0]["reason"]
        running.launcher.lose_machine("n1")
        smaller = running.world_of(2)
        assert "mesh dp 1 × tp 2" in smaller["reason"]
        assert smaller["restore_how"] == "parity"
        assert running.finish().ok
    found = results(tmp_path)[0]
    assert found["mesh"] == [1, 2]
    wanted = undisturbed((MeshSize(tp=2), Mesh(tp=2), ["fsdp_tp"], None), tmp_path)
    assert found["seen"] == wanted["seen"][-len(found["seen"]) :], "the same samples"
    assert found["losses"] == pytest.approx(wanted["losses"][-len(found["losses"]) :], rel=1e-5)
    for name, values in wanted["weights"].items():
        assert found["weights"][name] == pytest.approx(values, abs=1e-4), name


def test_a_lost_machine_takes_a_pipeline_along_and_the_other_trains_it_all(tmp_path: Path) -> None:
    kind = "fsdp 1f1b dropout"
    with training(tmp_path, "--pp", "2", "--kind", kind, "--exact") as running:
        assert "mesh dp 2 × pp 2" in running.events("proposed")[0]["reason"]
        running.launcher.lose_machine("n1")
        assert running.world_of(2)["restore_how"] == "parity"
        assert running.finish().ok
    found = results(tmp_path)
    turn: Turn = (MeshSize(pp=2), Mesh(pp=2), [kind], "float32")
    (wanted,) = all_ranks([turn], tmp_path, train=pipeline_bodies.train, steps=STEPS)
    assert pipeline_bodies.weights_of(found) == pipeline_bodies.weights_of(wanted)
    assert found[0]["losses"] == wanted[0]["losses"][-len(found[0]["losses"]) :]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of one rank without a pipeline, and with four stages on that rank."""
    turns: list[Turn] = [
        (MeshSize(), Mesh(), ["plain"], "float32"),
        (MeshSize(), Mesh(pp=(4, 2, 1)), ["bfs dropout settled"], "float32"),
    ]
    folder = tmp_path_factory.mktemp("alone")
    plain, staged = all_ranks(turns, folder, train=pipeline_bodies.train, steps=STEPS)
    return {"1f1b": plain[0], "bfs dropout settled": staged[0]}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["1f1b", "bfs dropout settled"])
def test_a_pipeline_goes_on_with_half_its_ranks_and_comes_back_without_a_trace(
    kind: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    """One stage per rank, fewer of them with fewer ranks; four stages, at the ranks there are.

    A parameter that the first step freezes stays frozen at the ranks that take over its stage.
    """
    flags = ("--pp", "4,2", "--kind", kind, "--exact", "--then", "6")
    with training(tmp_path, *flags) as running:
        assert "mesh dp 1 × pp 4" in running.events("proposed")[0]["reason"]
        smaller = lose_a_worker(running, left=2)
    assert "mesh dp 1 × pp 2" in smaller["reason"]
    found = results(tmp_path)
    assert [result["mesh"] for result in found] == [[1, 4]] * 4
    wanted = alone[kind]
    assert pipeline_bodies.weights_of(found) == wanted["weights"]
    assert found[0]["losses"] == wanted["losses"][-len(found[0]["losses"]) :]
