"""Running statistics and spectral norms have the same bits at every number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from norm_bodies import WAYS, train_all
from ranks import ranks

Trained = dict[str, dict[str, Any]]


def trained(world_size: int, folder: Path) -> list[Trained]:
    with ranks(world_size, train_all, folder) as running:
        return running.results(timeout_s=250)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the results of every way of training on one rank."""
    return trained(1, tmp_path_factory.mktemp("alone"))[0]


def test_what_wraps_the_model_does_not_show(alone: Trained) -> None:
    for exact in ("float32", "int64"):
        assert alone[f"plain, {exact}"] == alone[f"ddp, {exact}"] == alone[f"fsdp2, {exact}"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_the_statistics_of_one_that_runs_all_microbatches(
    tmp_path: Path, alone: Trained, world_size: int
) -> None:
    by_rank = trained(world_size, tmp_path)
    for found in by_rank:
        for way in WAYS:
            assert found[way]["buffers"] == by_rank[0][way]["buffers"], way
            if "None" not in way and way != "queue":
                assert found[way] == alone[way], way
    assert {found["queue"]["seen"] for found in by_rank} == {{2: 6, 3: 3}[world_size]}, "of rank 0"
