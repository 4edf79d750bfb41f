"""Pipeline stages: the same microbatches, sums and weights at every depth of the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pipeline_bodies
import pytest
from mesh_bodies import Turn, all_ranks

from holdfast.elastic.config import Mesh
from holdfast.elastic.membership.records import MeshSize

KINDS = ["1f1b dropout", "gpipe", "fsdp 1f1b"]
LOOPED = "bfs dropout"
"""Four stages, however many ranks there are for them."""


def _train(turns: list[Turn], folder: Path) -> list[dict[str, Any]]:
    """Return the weights of all stages, and what all ranks agree on."""
    found = []
    for results in all_ranks(turns, folder, train=pipeline_bodies.train):
        weights = pipeline_bodies.weights_of(results)
        agreed = {name: results[0][name] for name in ("norms", "losses")}
        assert all(agreed.items() <= result.items() for result in results)
        found.append({"weights": weights, **agreed})
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of two ranks: two stages, four, no pipeline, and all four stages at every rank."""
    turns: list[Turn] = [
        (MeshSize(pp=2), Mesh(pp=2), [*KINDS, LOOPED], "float32"),
        (MeshSize(dp=2), Mesh(), ["plain"], "float32"),
        (MeshSize(dp=2), Mesh(pp=(2, 1)), [LOOPED], "float32"),
    ]
    found = _train(turns, tmp_path_factory.mktemp("two"))
    return dict(zip([*KINDS, LOOPED, "plain", "at every rank"], found, strict=True))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of four ranks: two pipelines of two ranks, and one of four."""
    kinds = [*KINDS, LOOPED, "fsdp interleaved"]
    turns: list[Turn] = [
        (MeshSize(dp=2, pp=2), Mesh(pp=2), kinds, "float32"),
        (MeshSize(pp=4), Mesh(pp=4), [LOOPED], "float32"),
    ]
    found = _train(turns, tmp_path_factory.mktemp("four"))
    return dict(zip([*kinds, "one at every rank"], found, strict=True))


@pytest.mark.parametrize("kind", [*KINDS, LOOPED])
def test_the_number_of_pipelines_does_not_show_in_a_bit_of_what_they_train(
    kind: str, two: dict[str, Any], four: dict[str, Any]
) -> None:
    assert four[kind] == two[kind]


@pytest.mark.parametrize("kind", ["gpipe", "fsdp 1f1b"])
def test_without_dropout_the_number_of_stages_does_not_either(
    kind: str, two: dict[str, Any]
) -> None:
    assert two[kind] == two["plain"]


def test_nor_does_it_with_several_sharded_stages_at_every_rank(
    two: dict[str, Any], four: dict[str, Any]
) -> None:
    assert four["fsdp interleaved"] == two["plain"]


def test_with_dropout_equally_many_stages_train_the_same_on_any_number_of_ranks(
    two: dict[str, Any], four: dict[str, Any]
) -> None:
    assert two[LOOPED] == two["at every rank"]
    assert two[LOOPED] == four["one at every rank"]
    assert two[LOOPED] != two["1f1b dropout"]
