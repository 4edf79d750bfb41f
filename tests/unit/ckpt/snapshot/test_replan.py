"""Values are exchanged over a separate store, and no wait is unbounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from holdfast.ckpt.errors import FencedError, StateError
from holdfast.ckpt.snapshot.store_gather import PART_CHARACTERS, StoreGather


def gathers(size: int, **options: Any) -> list[StoreGather]:
    store = HashStore()
    return [StoreGather(store, rank=rank, size=size, **options) for rank in range(size)]


def together(ranks: list[StoreGather], values: list[Any]) -> list[list[Any]]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [
            f.result(20) for f in [pool.submit(*each) for each in zip(ranks, values, strict=True)]
        ]


def test_every_rank_gets_the_values_of_all_in_rank_order_time_after_time() -> None:
    ranks = gathers(3)
    for turn in range(4):
        values = [{"rank": rank, "turn": turn} for rank in range(3)]
        assert together(ranks, values) == [values] * 3


def test_values_larger_than_a_store_takes_are_put_together_again() -> None:
    large = "é" * (2 * PART_CHARACTERS + 5)
    assert together(gathers(2), [large, ""]) == [[large, ""]] * 2


def test_a_rank_alone_is_its_own_answer() -> None:
    assert gathers(1)[0]("value") == ["value"]


def test_what_was_read_by_all_is_removed() -> None:
    store = HashStore()
    ranks = [StoreGather(store, rank=rank, size=2) for rank in range(2)]
    for turn in range(20):
        together(ranks, [turn, turn])
    together(ranks, ["last", "last"])
    assert store.num_keys() <= 2 * 2 * 2


def test_a_rank_that_waits_alone_is_told_so_and_plans_no_more() -> None:
    first, second = gathers(2, timeout_s=0.05)
    together([first, second], [0, 0])
    with pytest.raises(StateError, match=r"rank 1 did not begin to plan within 0\.05 s"):
        first(1)
    with pytest.raises(StateError, match="rank 0 gave up waiting for the other ranks to plan"):
        second(1)
    with pytest.raises(StateError, match="after an earlier failure: rank 1 did not begin"):
        first(2)


def test_a_wait_ends_with_what_the_poll_raises() -> None:
    def poll() -> None:
        raise FencedError("over")

    with pytest.raises(FencedError):
        gathers(2, poll=poll)[0]("value")
