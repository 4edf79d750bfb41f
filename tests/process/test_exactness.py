"""Exact mode: weights, norms and losses do not depend on the number of ranks, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from rank_bodies import train
from ranks import ranks


def _train(world_size: int, folder: Path, **how: bool) -> dict[str, Any]:
    """Return what the ranks agree on, and how many microbatches each ran."""
    with ranks(world_size, functools.partial(train, **how), folder) as running:
        results = running.results()
    counts = [result.pop("microbatches") for result in results]
    assert all(result == results[0] for result in results)
    return {**results[0], "microbatches": counts}


@pytest.mark.parametrize("sharded", [True, False], ids=["fsdp2", "plain"])
def test_weights_are_equal_at_one_two_and_three_ranks(tmp_path: Path, *, sharded: bool) -> None:
    found = [_train(size, tmp_path, exact=True, sharded=sharded) for size in (1, 2, 3)]
    # The first step measures the grid, the sixth (a loss 50 times larger) outgrows it.
    assert {result["regrids"] for result in found} == {2}
    assert sum(found[0].pop("microbatches")) == sum(found[1]["microbatches"]) == 5 * (8 + 2)
    assert len(set(found[2].pop("microbatches"))) == 2  # uneven shares
    found[1].pop("microbatches")
    assert found[0] == found[1] == found[2]


def test_without_exact_the_microbatches_are_the_same_but_the_rounding_differs(
    tmp_path: Path,
) -> None:
    one, two = (_train(size, tmp_path, exact=False, sharded=True) for size in (1, 2))
    assert one["norms"] == pytest.approx(two["norms"], rel=1e-3)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)
    assert one["hash"] != two["hash"]
