"""Exact mode: weights, norms and losses do not depend on the number of ranks, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from disturbed import alone_and_disturbed
from rank_bodies import train_in_turn
from ranks import ranks
from tree import HELPERS

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"how": "plain", "exact": "float32"},
    "ddp": {"how": "ddp", "exact": "float32"},
    "fsdp2": {"how": "fsdp2", "exact": "float32"},
    "hsdp": {"how": "hsdp", "exact": "float32"},
    "ddp, int64": {"how": "ddp", "exact": "int64"},
    "hsdp, int64": {"how": "hsdp", "exact": "int64"},
    "bfloat16 by fsdp2": {"how": "mixed", "exact": "float32"},
    "bfloat16 computed in float32": {"how": "widened", "exact": "float32"},
}
INEXACT: dict[str, dict[str, Any]] = {
    "ddp": {"how": "ddp", "exact": None},
    "hsdp": {"how": "hsdp", "exact": None},
}
SCRIPT = HELPERS / "tiny_training.py"

Trained = dict[str, dict[str, Any]]


def trained(world_size: int, folder: Path) -> Trained:
    """Train in every way; return what all ranks agree on."""
    ways = WAYS | {f"inexact {name}": how for name, how in INEXACT.items()}
    with ranks(world_size, functools.partial(train_in_turn, ways=ways), folder) as running:
        by_rank = running.results(timeout_s=250)
    shares = [result["plain"]["microbatches"] for result in by_rank]
    assert sum(shares) == 5 * 8
    assert world_size == 1 or len(set(shares)) == 2, "uneven shares"
    for result in by_rank:
        for way in result.values():
            del way["microbatches"]
    assert all(result == by_rank[0] for result in by_rank)
    found: Trained = by_rank[0]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the results of every way of training on one rank."""
    return trained(1, tmp_path_factory.mktemp("alone"))


def test_what_wraps_the_model_does_not_show_in_the_weights(alone: Trained) -> None:
    assert alone["plain"] == alone["ddp"] == alone["fsdp2"] == alone["hsdp"]
    assert alone["ddp, int64"] == alone["hsdp, int64"]
    assert alone["ddp, int64"]["hash"] != alone["ddp"]["hash"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_weights_are_those_of_one_rank_and_without_exact_nearly(
    tmp_path: Path, alone: Trained, world_size: int
) -> None:
    found = trained(world_size, tmp_path)
    for way in WAYS:
        assert found[way] == alone[way], way
    for way in INEXACT:
        one, several = alone[f"inexact {way}"], found[f"inexact {way}"]
        assert one["norms"] == pytest.approx(several["norms"], rel=1e-3)
        assert one["loss"] == pytest.approx(several["loss"], rel=1e-3)
        assert one["hash"] != several["hash"]


def test_a_ddp_job_that_loses_a_worker_ends_with_the_weights_of_a_plain_one(
    tmp_path: Path,
) -> None:
    alone, found = alone_and_disturbed(
        SCRIPT, tmp_path, ranks=2, flags=["--steps", "40"], in_job=["--ddp", "--pace", "0.4"]
    )
    assert found == alone
