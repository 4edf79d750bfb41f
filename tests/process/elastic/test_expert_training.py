"""Experts shared among ranks: equal sums for every distribution and number of copies."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import mesh_bodies
import pipeline_bodies
import pytest
from mesh_bodies import Turn
from ranks import ranks

from holdfast.elastic.config import Batch, Mesh
from holdfast.elastic.membership.records import MeshSize

BATCH = Batch(microbatches=6, size=3)
TWO, FOUR = MeshSize(dp=2, ep=2), MeshSize(dp=4, ep=2)


def _train(turns: dict[str, Turn], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the common result of all ranks, and under ``seen`` the samples of each."""
    size = next(iter(turns.values()))[0].ranks
    body = functools.partial(
        mesh_bodies.train_in_turn, turns=list(turns.values()), steps=2, batch=BATCH
    )
    with ranks(size, body, folder, with_world=False) as running:
        by_rank = running.results()
    found = []
    for results in zip(*by_rank, strict=True):
        seen = [result.pop("seen") for result in results]
        assert all(result == results[0] for result in results)
        found.append({**results[0], "seen": seen})
    return dict(zip(turns, found, strict=True))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one rank, which has all experts."""
    turns: dict[str, Turn] = {"whole": (MeshSize(), Mesh(ep=(2, 1)), ["experts"], None)}
    return _train(turns, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of two ranks with half the experts each."""
    turns: dict[str, Turn] = {
        "plain": (TWO, Mesh(ep=2), ["experts"], "float32"),
        "fixed": (TWO, Mesh(ep=2), ["experts"], "int64"),
        "fsdp": (TWO, Mesh(ep=2), ["experts_fsdp"], "float32"),
        "loose": (TWO, Mesh(ep=2), ["experts"], None),
        "alike": (MeshSize(dp=2), Mesh(ep=(2, 1)), ["experts"], None),
    }
    return _train(turns, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of four ranks, two and two of which have all experts."""
    shards = MeshSize(dp=4, ep=2, shard=2)
    turns: dict[str, Turn] = {
        "plain": (FOUR, Mesh(ep=2), ["experts"], "float32"),
        "fixed": (FOUR, Mesh(ep=2), ["experts"], "int64"),
        "fsdp": (FOUR, Mesh(ep=2), ["experts_fsdp"], "float32"),
        "hsdp": (shards, Mesh(shard=2, ep=2), ["experts_fsdp"], "float32"),
        "tensor": (MeshSize(dp=2, tp=2, ep=2), Mesh(tp=2, ep=2), ["experts"], "float32"),
    }
    return _train(turns, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        ("plain", "plain"),
        ("fsdp", "plain"),
        ("hsdp", "plain"),
        ("tensor", "plain"),
        ("fixed", "fixed"),
    ],
)
def test_how_often_the_experts_are_there_does_not_show_in_a_bit(
    kind: str, reference: str, two: dict[str, Any], four: dict[str, Any]
) -> None:
    for what in ("hash", "weights", "norms", "losses"):
        assert four[kind][what] == two[reference][what]
    if kind in two:
        assert two[kind]["hash"] == two[reference]["hash"]


def test_those_who_have_the_experts_between_them_run_as_many_microbatches_side_by_side(
    two: dict[str, Any], four: dict[str, Any]
) -> None:
    for found in (two["plain"], four["plain"]):
        shares = [len(seen) for seen in found["seen"]]
        assert shares[0::2] == shares[1::2]
    rounds = list(zip(*two["plain"]["seen"], strict=True))
    others = [list(zip(*four["plain"]["seen"][at : at + 2], strict=True)) for at in (0, 2)]
    assert sorted(others[0] + others[1]) == sorted(rounds)


def test_the_stages_of_a_pipeline_have_their_experts_between_ranks_too(tmp_path: Path) -> None:
    turns: list[Turn] = [
        (FOUR, Mesh(ep=2), ["experts"], "float32"),
        (MeshSize(dp=2, pp=2, ep=2), Mesh(pp=2, ep=2), ["experts 1f1b"], "float32"),
    ]
    body = functools.partial(
        mesh_bodies.train_in_turn,
        turns=turns,
        train=pipeline_bodies.train,
        steps=2,
        batch=BATCH,
    )
    with ranks(4, body, tmp_path, with_world=False) as running:
        by_rank = running.results()
    for whole, stage in by_rank:
        assert stage["norms"] == whole["norms"]
        assert stage["losses"] == whole["losses"]
        assert all(values == whole["weights"][name] for name, values in stage["weights"].items())
    assert by_rank[0][1]["weights"].keys() != by_rank[1][1]["weights"].keys()


@pytest.mark.parametrize("kind", ["loose", "alike"])
def test_another_number_of_experts_per_rank_differs_by_rounding_alone(
    kind: str, one: dict[str, Any], two: dict[str, Any]
) -> None:
    found, whole = two[kind], one["whole"]
    assert found["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(whole["norms"], rel=1e-6)
    for name, values in whole["weights"].items():
        assert found["weights"][name] == pytest.approx(values, abs=1e-5), name
