"""Values are exchanged over a separate store, and no wait is unbounded."""

from __future__ import annotations

import time
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


def test_a_rank_that_comes_as_the_others_give_up_is_in_time() -> None:
    store, calls = HashStore(), []
    second = StoreGather(store, rank=1, size=2)
    with ThreadPoolExecutor(1) as pool:

        def come_late() -> None:
            if first.timeout_s < 1 and len(calls) < 2:
                calls.append(pool.submit(second, 1))
                store.wait(["1/1"])
                time.sleep(2 * first.timeout_s)  # now the time is over, and nobody is late

        first = StoreGather(store, rank=0, size=2, poll=come_late)
        calls.append(pool.submit(second, 0))
        assert first(0) == [0, 0]
        first.timeout_s = 0.05
        assert first(1) == [1, 1]
        assert [call.result(20) for call in calls] == [[0, 0], [1, 1]]


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
