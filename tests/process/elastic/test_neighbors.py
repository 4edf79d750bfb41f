"""Whole jobs lose a stage of their pipeline for good, beyond the parity."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobs import Event, Job, job
from tree import HELPERS

from holdfast.ckpt.checkpoints.catalog import committed_steps, quick_verify
from holdfast.ckpt.store.places import open_store
from holdfast.elastic.neighbors.marks import marks_of

SCRIPT = HELPERS / "neighbor_training.py"
HELD = 6


@contextmanager
def training(folder: Path, *flags: str, nodes: int) -> Iterator[Job]:
    """Run one worker per node; the first generation stands still when step `HELD` is protected."""
    (folder / "results").mkdir()
    root = ("--root", str(folder / "saved"))
    flags = ("--results", str(folder / "results"), "--first", str(HELD), *root, *flags)
    with job(folder, *flags, nodes=nodes, per_node=1, script=SCRIPT) as running:
        running.await_event(lambda e: e["kind"] == "held" and e["step"] == HELD)
        yield running


def node_of(running: Job, rank: int) -> str:
    """Return the node of a rank of the first generation."""
    found = [e for e in running.events("reformed") if (e["generation"], e["rank"]) == (1, rank)]
    return str(found[0]["node"])


def spare_of(running: Job, ranks: int) -> str:
    """Return a node that has only parity."""
    used = {node_of(running, rank) for rank in range(ranks)}
    return min({f"n{number}" for number in range(5)} - used)


def lose(running: Job, *nodes: str) -> None:
    """Make machines vanish at once."""
    with ThreadPoolExecutor() as pool:
        assert all(pool.map(running.launcher.lose_machine, nodes))


def results(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the state with which the last generation began, by place of the pipeline."""
    found: dict[int, list[dict[str, Any]]] = {}
    for file in sorted((folder / "results").iterdir()):
        each = json.loads(file.read_text())
        found.setdefault(each["place"], []).append(each)
    return found


def newest_proposal(running: Job) -> Event:
    return running.events("proposed")[-1]


def means(before: dict[int, list[dict[str, Any]]], place: int) -> dict[str, list[float]]:
    """Return the mean of the stages beside a place, by the names in that stage."""
    found = {}
    left, right = (before[other][0]["weights"] for other in (place - 1, place + 1))
    for number in (2 * place, 2 * place + 1):
        for kind in ("weight", "bias"):
            pair = [
                weights[f"blocks.{other}.mix.{kind}"]
                for weights, other in ((left, number - 2), (right, number + 2))
            ]
            name = f"blocks.{number}.mix.{kind}"
            found[name] = [(a + b) / 2 for a, b in zip(*pair, strict=True)]
    return found


@pytest.mark.parametrize("lost", [1])
def test_an_inner_stage_lost_beyond_the_parity_becomes_the_mean_of_its_neighbours(
    lost: int, tmp_path: Path
) -> None:
    flags = ("--beyond", "3", "--every", "1000")
    with training(tmp_path, *flags, nodes=5) as running:
        lose(running, node_of(running, lost), spare_of(running, 3))
        assert running.finish().ok
        (event,) = [e for e in running.events("approximate") if e["fresh"]]
        words = f"approximate since step {HELD}: stage 1 from stages 0 and 2"
        assert (event["step"], event["stages"], event["text"]) == (HELD, {"1": [0, 2]}, words)
        reason = newest_proposal(running)["reason"]
        assert "the stages of place 1 of the pipeline from their neighbours" in reason
    found = results(tmp_path)
    assert {each["step"] for (each,) in found.values()} == {HELD}
    own = found[lost][0]
    for name, values in means(found, lost).items():
        assert own["weights"][name] == pytest.approx(values, rel=1e-6)
    assert set(own["states"]) == {0}, "its optimizer begins anew"
    assert all(set(found[place][0]["states"]) == {3} for place in (0, 2))
    store = open_store(str(tmp_path / "saved"))
    (step,) = committed_steps(str(tmp_path / "saved"))
    (mark,) = marks_of(quick_verify(store, step).values)
    assert mark.text == words
