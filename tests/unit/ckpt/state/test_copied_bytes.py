"""A rank knows how much of its state its replicas write."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch

from holdfast.ckpt.state.capture import CapturePlan, flatten

RANKS = 3


def plans(states: list[dict[str, Any]]) -> list[CapturePlan]:
    """Plan as ranks do, in threads."""
    barrier, board = Barrier(len(states), timeout=20), list[Any]([None] * len(states))

    def plan(rank: int) -> CapturePlan:
        def gather(value: Any) -> list[Any]:
            board[rank] = value
            barrier.wait()
            return list(board)

        return CapturePlan.build(
            flatten(states[rank]), rank=rank, world_size=len(states), gather=gather
        )

    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(plan, range(len(states))))


def test_what_all_ranks_hold_is_written_once_and_held_by_each() -> None:
    shared = {f"w{number}": torch.zeros(100) for number in range(6)}
    found = plans([dict(shared) for _ in range(RANKS)])
    assert [plan.copied_bytes for plan in found] == [4 * 400] * RANKS


def test_one_rank_copies_nothing() -> None:
    (found,) = plans([{"w": torch.zeros(100)}])
    assert found.copied_bytes == 0
