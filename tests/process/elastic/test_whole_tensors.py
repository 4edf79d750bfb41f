"""Optimizers whose update needs whole tensors give the same bits at every number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from disturbed import alone_and_disturbed
from norm_bodies import KINDS, optimize_all
from ranks import ranks
from tree import HELPERS

SCRIPT = HELPERS / "whole_training.py"


def optimized(world_size: int, folder: Path) -> dict[str, Any]:
    with ranks(world_size, optimize_all, folder) as running:
        by_rank = running.results(timeout_s=250)
    found: dict[str, Any] = by_rank[0]
    assert all(each == found for each in by_rank)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of every optimizer on one rank."""
    return optimized(1, tmp_path_factory.mktemp("alone"))


def test_shards_do_not_show_in_the_weights_and_the_state(alone: dict[str, Any]) -> None:
    for kind in KINDS:
        assert alone[f"plain, {kind}"] == alone[f"fsdp2, {kind}"] == alone[f"hsdp, {kind}"]


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_the_weights_are_those_of_one_rank(
    tmp_path: Path, alone: dict[str, Any], world_size: int
) -> None:
    for way, found in optimized(world_size, tmp_path).items():
        assert found == alone[way], way


@pytest.mark.exhaustive
def test_a_job_that_loses_a_worker_ends_as_one_process_does(tmp_path: Path) -> None:
    alone, found = alone_and_disturbed(SCRIPT, tmp_path, ranks=3)
    assert found == alone
