"""Steps of several passes, and other backwards than the run's: equal bits at every world size."""

from __future__ import annotations

import functools
from pathlib import Path

from phase_bodies import LOOPS, train_all
from ranks import ranks


def trained(world_size: int, folder: Path) -> dict[str, str]:
    body = functools.partial(train_all, ways=("float32", "int64"))
    with ranks(world_size, body, folder) as running:
        by_rank: list[dict[str, str]] = running.results(timeout_s=250)
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


def test_every_loop_has_the_weights_of_one_rank(tmp_path: Path) -> None:
    alone = trained(1, tmp_path / "alone")
    assert len(set(alone.values())) == 2 * len(LOOPS) - 2, "both kinds of checkpointing are alike"
    assert alone["checkpointed int64"] == alone["checkpointed, reentrant int64"]
    assert trained(3, tmp_path / "three") == alone
