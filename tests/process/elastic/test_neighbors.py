"""Whole jobs lose a stage of their pipeline for good, beyond the parity."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, job
from tree import HELPERS

from holdfast.ckpt.checkpoints.catalog import committed_steps, quick_verify
from holdfast.ckpt.store.places import open_store
from holdfast.elastic.neighbors.marks import in_words, marks_of

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


def mark_of(root: Path) -> str:
    """Return the marks of the newest checkpoint, in words."""
    step = max(committed_steps(str(root)))
    return in_words(marks_of(quick_verify(open_store(str(root)), step).values))


def test_an_inner_stage_lost_beyond_the_parity_becomes_the_mean_of_its_neighbours(
    tmp_path: Path,
) -> None:
    with training(tmp_path, "--beyond", "3", nodes=5) as running:
        lose(running, node_of(running, 1), spare_of(running, 3))
        assert running.finish().ok
        (event,) = [e for e in running.events("approximate") if e["fresh"]]
        words = f"approximate since step {HELD}: stage 1 from stages 0 and 2"
        assert (event["step"], event["stages"], event["text"]) == (HELD, {"1": [0, 2]}, words)
        reason = running.events("proposed")[-1]["reason"]
        assert "the stages of place 1 of the pipeline from their neighbours" in reason
    found = results(tmp_path)
    assert {each["step"] for (each,) in found.values()} == {HELD}, "all go on where they were"
    own = found[1][0]
    for name, values in means(found, 1).items():
        assert own["weights"][name] == pytest.approx(values, rel=1e-6)
    assert set(own["states"]) == {0}, "its optimizer begins anew"
    assert all(set(found[place][0]["states"]) == {3} for place in (0, 2))
    assert mark_of(tmp_path / "saved") == words


@pytest.mark.exhaustive
def test_the_last_stage_becomes_a_copy_of_the_one_before(tmp_path: Path) -> None:
    with training(tmp_path, "--beyond", "3", "--parity", "0", nodes=4) as running:
        lose(running, node_of(running, 2))
        assert running.finish().ok
    found = results(tmp_path)
    before, last = found[1][0]["weights"], found[2][0]["weights"]
    for kind in ("weight", "bias"):
        for number in (4, 5):
            assert last[f"blocks.{number}.mix.{kind}"] == before[f"blocks.{number - 2}.mix.{kind}"]
    assert mark_of(tmp_path / "saved").endswith("stage 2 from stage 1")


@pytest.mark.exhaustive
def test_sharded_stages_are_set_shard_by_shard(tmp_path: Path) -> None:
    flags = ("--beyond", "3", "--parity", "0", "--dp", "2", "--shard")
    with training(tmp_path, *flags, nodes=7) as running:
        lose(running, node_of(running, 1))
        assert running.finish().ok
    found = results(tmp_path)
    assert all(len(each) == 2 for each in found.values())
    for own in found[1]:
        for name, values in means(found, 1).items():
            assert own["weights"][name] == pytest.approx(values, rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [("--beyond", "-1"), ("--beyond", "3")], ids=["off", "near"])
def test_the_run_goes_back_if_a_restore_point_is_near_or_nothing_else_is_asked_for(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    with training(tmp_path, "--parity", "0", "--every", "4", *flags, nodes=4) as running:
        running.await_event(lambda e: e["kind"] == "checkpoint_done" and e["step"] == 4)
        lose(running, node_of(running, 1))
        assert running.finish().ok
        assert not running.events("approximate")
        tiers = {e["tier"] for e in running.events("restored") if e["generation"] > 1}
        assert tiers == {"checkpoint"}
    assert {each["step"] for (each,) in results(tmp_path).values()} == {4}
    assert mark_of(tmp_path / "saved") == ""


@pytest.mark.exhaustive
def test_the_first_stage_has_the_progress_of_the_run_and_goes_back(tmp_path: Path) -> None:
    with training(tmp_path, "--beyond", "1", "--parity", "0", "--every", "4", nodes=4) as running:
        running.await_event(lambda e: e["kind"] == "checkpoint_done" and e["step"] == 4)
        lose(running, node_of(running, 0))
        assert running.finish().ok
        reason = next(e["reason"] for e in running.events("proposed") if e["generation"] > 1)
        assert "the stages of place 0 of the pipeline are lost, and nothing is like them" in reason
    assert {each["step"] for (each,) in results(tmp_path).values()} == {4}
