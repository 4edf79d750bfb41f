"""Sparse gradients give the same bits at every number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from norm_bodies import FACTORIZED, factorize_all
from ranks import ranks


def factorized(world_size: int, folder: Path) -> dict[str, Any]:
    with ranks(world_size, factorize_all, folder) as running:
        by_rank = running.results(timeout_s=250)
    found: dict[str, Any] = by_rank[0]
    assert all(each == found for each in by_rank)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of every way on one rank."""
    return factorized(1, tmp_path_factory.mktemp("alone"))


def test_what_wraps_the_model_does_not_show(alone: dict[str, Any]) -> None:
    for exact in ("float32", "int64"):
        assert alone[f"plain, {exact}"] == alone[f"ddp, {exact}"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_weights_are_those_of_one_rank(
    tmp_path: Path, alone: dict[str, Any], world_size: int
) -> None:
    found = factorized(world_size, tmp_path)
    for way in FACTORIZED:
        assert found[way]["norms"] == pytest.approx(alone[way]["norms"], rel=1e-3)
        if "None" not in way:
            assert found[way] == alone[way], way
