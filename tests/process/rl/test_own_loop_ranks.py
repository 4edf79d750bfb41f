"""The samples of rank 0 are the batch of every rank."""

from __future__ import annotations

from pathlib import Path

from own_loop_bodies import train_two_steps
from ranks import ranks


def test_all_ranks_train_on_what_rank_0_sampled(tmp_path: Path) -> None:
    with ranks(2, train_two_steps, tmp_path) as running:
        first, second = running.results()
    assert first == second
    assert [len(batch) for batch in first] == [4, 4]
    assert all(tokens for batch in first for _, tokens in batch)
