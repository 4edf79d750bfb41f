"""Pipeline stages: the same microbatches, sums and weights, however deep the pipeline is."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from pipeline_bodies import Turn, train_in_turn
from ranks import ranks

from elastic.config import Mesh
from elastic.records import MeshSize

KINDS = ["1f1b dropout", "gpipe", "fsdp 1f1b"]


def _train(turns: list[Turn], folder: Path) -> list[dict[str, Any]]:
    """Return the weights of all stages, and what all ranks agree on."""
    size = turns[0][0].ranks
    body = functools.partial(train_in_turn, turns=turns)
    with ranks(size, body, folder, with_world=False) as running:
        by_rank = running.results()
    found = []
    for results in zip(*by_rank, strict=True):
        weights: dict[str, list[float]] = {}
        for result in results:
            for name, values in result.pop("weights").items():
                assert weights.setdefault(name, values) == values
        assert all(result == results[0] for result in results)
        found.append({"weights": weights, **results[0]})
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of two ranks: two stages, and no pipeline."""
    turns: list[Turn] = [
        (MeshSize(pp=2), Mesh(pp=2), KINDS),
        (MeshSize(dp=2), Mesh(), ["plain"]),
    ]
    found = _train(turns, tmp_path_factory.mktemp("two"))
    return dict(zip([*KINDS, "plain"], found, strict=True))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of four ranks: two pipelines of two stages."""
    turns: list[Turn] = [(MeshSize(dp=2, pp=2), Mesh(pp=2), KINDS)]
    return dict(zip(KINDS, _train(turns, tmp_path_factory.mktemp("four")), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_pipelines_does_not_show_in_a_bit_of_what_they_train(
    kind: str, two: dict[str, Any], four: dict[str, Any]
) -> None:
    assert four[kind] == two[kind]


@pytest.mark.parametrize("kind", ["gpipe", "fsdp 1f1b"])
def test_without_dropout_the_number_of_stages_does_not_either(
    kind: str, two: dict[str, Any]
) -> None:
    assert two[kind] == two["plain"]
