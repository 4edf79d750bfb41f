"""The tree says the same as all ranks with all: real gloo groups, between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.torch_private import PrefixStore
from holdfast.elastic.groups import tree
from holdfast.elastic.groups.circles import path_of, rings_of
from holdfast.elastic.groups.collectives import InterruptibleGroup
from holdfast.elastic.groups.tree import MessageTree, adds, compares
from holdfast.elastic.groups.waits import WaitGuard

NODES = ["a", "a", "b", "a", "c", "b", "a"]
LIMIT = timedelta(seconds=60)


class Grove:
    """The trees of all members, each of which may be used by a thread of its own."""

    def __init__(self, nodes: list[str], *, fan_out: int) -> None:
        self.nodes, self.fan_out, self.store = nodes, fan_out, HashStore()
        self.guards = [WaitGuard(1, lambda: False) for _ in nodes]
        self._pool = ThreadPoolExecutor(len(nodes))
        self.trees = self.together(self._plant)

    def together(self, work: Callable[[int], Any]) -> list[Any]:
        """Return what each member's call returns, in their order."""
        return [
            each.result(60) for each in [self._pool.submit(work, m) for m in range(len(self.nodes))]
        ]

    def _plant(self, member: int) -> MessageTree:
        guard = self.guards[member]
        circles = []
        for number, circle in path_of(member, rings_of(self.nodes, fan_out=self.fan_out)).items():
            index, size = circle.index(member), len(circle)
            store = PrefixStore(f"{number}/{circle[0]}", self.store)
            gloo = torch_private.gloo_group(store, index, size, host="127.0.0.1", timeout=LIMIT)
            circles.append(InterruptibleGroup(gloo, index, size, guard=guard))
        return MessageTree(
            circles,
            member=member,
            members=len(self.nodes),
            join=lambda: guard.join("tree/own"),
        )

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(scope="module")
def grove() -> Iterator[Grove]:
    found = Grove(NODES, fan_out=2)
    yield found
    found.close()


def test_sums_and_largest_values_are_those_of_all(grove: Grove) -> None:
    def work(member: int) -> list[Any]:
        total = torch.tensor([[member, 2**40], [-member, 1]]).t()  # not contiguous
        grove.trees[member].sum_(total)
        small = torch.tensor([100 + member], dtype=torch.int8)
        grove.trees[member].sum_(small)
        highest = torch.tensor([-1.0 - member, float("inf") if member == 3 else 0.0, -0.0])
        grove.trees[member].max_(highest)
        return [total.tolist(), small.item(), highest.tolist()]

    size, count = len(NODES), sum(range(len(NODES)))
    wrapped = (100 * size + count + 128) % 256 - 128
    expected = [[[count, -count], [size * 2**40, size]], wrapped, [-1.0, float("inf"), 0.0]]
    assert grove.together(work) == [expected] * size


@pytest.mark.parametrize("length", [0, 1, 900, 1015, 1016, 1017, 5000])
def test_bytes_of_any_length_come_in_the_order_of_the_members(grove: Grove, length: int) -> None:
    data = [bytes([member]) * (length * (member % 3)) for member in range(len(NODES))]
    found = grove.together(lambda member: grove.trees[member].gather(data[member]))
    assert found == [data] * len(NODES)


def test_all_members_count_a_message_alike(grove: Grove) -> None:
    before = [dict(guard.joined) for guard in grove.guards]
    grove.together(lambda member: grove.trees[member].meet())
    after = [guard.joined["tree/own"] for guard in grove.guards]
    assert after == [each["tree/own"] + 1 for each in before]


def test_nobody_passes_before_the_last_came(grove: Grove) -> None:
    came, gate = threading.Semaphore(0), threading.Event()
    passed: list[int] = []

    def work(member: int) -> None:
        if member == 4:
            gate.wait(60)
        came.release()
        grove.trees[member].meet()
        passed.append(member)

    with ThreadPoolExecutor(1) as waiting:
        found = waiting.submit(grove.together, work)
        try:
            for _ in range(len(NODES) - 1):
                assert came.acquire(timeout=60)
            assert passed == []
        finally:
            gate.set()
        found.result(60)
    assert sorted(passed) == list(range(len(NODES)))


def test_a_world_of_one_hears_itself() -> None:
    alone = MessageTree([], member=0, members=1)
    value = torch.tensor([3])
    alone.sum_(value)
    alone.meet()
    assert value.item() == 3
    assert alone.gather(b"x") == [bytearray(b"x")]


def test_members_that_did_not_all_speak_are_refused() -> None:
    with pytest.raises(PeerError, match="1 messages came of 2 ranks"):
        MessageTree([], member=0, members=2).gather(b"")


def test_only_short_tensors_without_an_order_take_the_tree() -> None:
    assert adds(torch.zeros(3, dtype=torch.int64))
    assert not adds(torch.zeros(3))  # a sum of floats has the bits of its order
    assert not adds(torch.zeros(tree.SHORT_BYTES + 1, dtype=torch.uint8))
    assert compares(torch.zeros(3, dtype=torch.float64))
    assert not compares(torch.zeros(3, dtype=torch.bfloat16))
    assert not compares(torch.zeros(3, device="meta"))
