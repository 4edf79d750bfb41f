"""Whole jobs with experts spread over ranks lose workers and machines, but none of the experts."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import mesh_bodies
import pytest
from jobs import hurt, job
from ranks import ranks
from tree import HELPERS

from holdfast.elastic.config import Batch, Exact, Mesh
from holdfast.elastic.membership.records import MeshSize

SCRIPT = HELPERS / "mesh_training.py"
STEPS, MICROBATCHES = 6, 6


def undisturbed(folder: Path, kind: str, *, ep: int, exact: Exact) -> dict[str, Any]:
    """Return what one group with all experts comes to that nothing happens to."""
    mesh = Mesh(ep=2) if ep > 1 else Mesh(ep=(2, 1))
    turn: mesh_bodies.Turn = (MeshSize(dp=ep, ep=ep), mesh, [kind], exact)
    body = functools.partial(
        mesh_bodies.train_in_turn,
        turns=[turn],
        steps=STEPS,
        batch=Batch(microbatches=MICROBATCHES, size=mesh_bodies.BATCH.size),
    )
    with ranks(ep, body, folder, with_world=False) as running:
        found: dict[str, Any] = running.results()[0][0]
    return found


def flags_of(results: Path, *more: str) -> tuple[str, ...]:
    """Return the flags of the script that all tests here share."""
    results.mkdir()
    steps = ("--steps", str(STEPS), "--first", "2", "--microbatches", str(MICROBATCHES))
    return ("--results", str(results), *steps, *more)


def result_in(results: Path) -> dict[str, Any]:
    """Return what the first rank of the last generation came to."""
    found: dict[str, Any] = json.loads((results / "0.json").read_text())
    return found


def test_a_lost_worker_takes_its_partner_along_and_both_come_back_without_a_trace(
    tmp_path: Path,
) -> None:
    results, kind = tmp_path / "results", "experts_fsdp"
    flags = flags_of(results, "--ep", "2", "--kind", kind, "--exact", "--then", "4")
    with job(tmp_path, *flags, nodes=2, per_node=2, script=SCRIPT) as running:
        running.await_event(lambda e: e["kind"] == "held")
        assert (
            "mesh dp 4 × ep 2, 2 groups of 2 ranks, 2 of 2 groups within a node"
            in (running.events("proposed")[0]["reason"])
        )
        hurt(running.worker("trainer/2"))
        smaller = running.world_of(2)
        assert "mesh dp 2 × ep 2, 1 groups of 2 ranks" in smaller["reason"]
        running.world_of(4, after=running.history.index(smaller))
        assert running.finish().ok
    found = result_in(results)
    assert found["mesh"] == [2, 2]
    wanted = undisturbed(tmp_path, kind, ep=2, exact="float32")
    assert found["hash"] == wanted["hash"]
    assert found["losses"] == wanted["losses"][-len(found["losses"]) :]


@pytest.mark.exhaustive
def test_the_last_machine_takes_over_the_experts_that_only_the_other_had(tmp_path: Path) -> None:
    results, kind = tmp_path / "results", "experts"
    flags = flags_of(results, "--ep", "2,1", "--kind", kind, "--ranks", "2")
    with job(tmp_path, *flags, nodes=2, per_node=1, script=SCRIPT) as running:
        running.await_event(lambda e: e["kind"] == "held")
        assert "mesh dp 2 × ep 2" in running.events("proposed")[0]["reason"]
        running.launcher.lose_machine("n1")
        smaller = running.world_of(1)
        assert smaller["restore_how"] == "parity"
        assert running.finish().ok
    found = result_in(results)
    assert found["mesh"] == [1, 1]
    wanted = undisturbed(tmp_path, kind, ep=1, exact=None)
    assert found["seen"] == wanted["seen"][-len(found["seen"]) :], "the same samples"
    assert found["losses"] == pytest.approx(wanted["losses"][-len(found["losses"]) :], rel=1e-5)
    for name, values in wanted["weights"].items():
        assert found["weights"][name] == pytest.approx(values, abs=1e-4), name
