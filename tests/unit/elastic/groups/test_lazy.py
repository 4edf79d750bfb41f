"""Lazy gloo groups: two ranks connect when they talk, through keys at their own points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import AllreduceOptions

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.apart import KeysApart, PointsOf
from holdfast.elastic.groups.lazy import FirstMessage, LazyGloo
from holdfast.elastic.meeting.point import MeetingPoint

KEY = RunKey.new()
SIZE = 4
LIMIT = timedelta(seconds=60)


class World:
    """The meeting points of some ranks, and a lazy group of them."""

    def __init__(self) -> None:
        self.points = [MeetingPoint(KEY) for _ in range(SIZE)]
        self.of = PointsOf([point.address for point in self.points], KEY, prefix="g1")
        self.views: list[KeysApart] = []
        self._pool = ThreadPoolExecutor(SIZE)

    def group(self, rank: int, name: str = "own") -> LazyGloo:
        keys = self.of.keys(name, ranks=range(SIZE), index=rank)
        self.views.append(keys)
        gloo = torch_private.gloo_group(
            keys, rank, SIZE, host="127.0.0.1", timeout=LIMIT, lazy=True
        )
        return LazyGloo(gloo, keys)

    def together(self, work: Callable[[int], Any]) -> list[Any]:
        return [each.result(60) for each in [self._pool.submit(work, r) for r in range(SIZE)]]

    def close(self) -> None:
        for view in self.views:
            view.leave()
        self._pool.shutdown()
        self.of.close()
        for point in self.points:
            point.close()


@pytest.fixture
def world() -> Iterator[World]:
    found = World()
    yield found
    found.close()


def test_a_group_forms_alone_and_asks_only_the_ranks_it_talks_to(world: World) -> None:
    alone = world.group(0)
    assert [point.requests for point in world.points] == [1, 0, 0, 0]
    groups = [alone, *(world.group(rank) for rank in range(1, SIZE))]

    def add(rank: int) -> float:
        total = torch.tensor([rank + 1.0])
        groups[rank].allreduce([total], AllreduceOptions()).wait()
        return total.item()

    assert world.together(add) == [10.0] * SIZE
    assert [point.requests for point in world.points] == [3] * SIZE  # its own, two neighbours'


def test_all_may_send_before_they_receive_and_messages_keep_their_order(world: World) -> None:
    def work(rank: int) -> list[float]:
        group, rooms = world.group(rank), [torch.zeros(1) for _ in range(6)]
        right, left = (rank + 1) % SIZE, (rank - 1) % SIZE
        sends = [group.send([torch.tensor([10.0 * rank + n])], right, 0) for n in range(3)]
        receives = [group.recv([room], left, 0) for room in rooms[:3]]
        for each in [*receives, *sends]:
            each.wait()
        later = [group.send([torch.tensor([10.0 * rank + n])], right, 0) for n in range(3, 6)]
        later += [group.recv([room], left, 0) for room in rooms[3:]]
        for each in later:
            each.wait()
            assert not isinstance(each, FirstMessage)  # the two have met
        return [room.item() for room in rooms]

    expected = [[10.0 * ((r - 1) % SIZE) + n for n in range(6)] for r in range(SIZE)]
    assert world.together(work) == expected


def test_a_source_must_be_named(world: World) -> None:
    with pytest.raises(ConfigError, match="name the source"):
        world.group(0).recv_anysource([torch.zeros(1)], 0)


def test_leaving_ends_an_operation_that_waits_for_a_rank_which_never_came(world: World) -> None:
    group = world.group(0)
    send = group.send([torch.zeros(1)], 1, 0)
    work = group.allreduce([torch.zeros(1)], AllreduceOptions())
    assert not send.is_completed()
    group.leave()
    with pytest.raises(PeerError, match=r"over|closed"):
        send.wait()
    assert send.is_completed()
    assert not send.is_success()
    with pytest.raises(PeerError, match=r"over|closed"):
        work.wait()
    assert world.views[0].is_quiet(timeout_s=60)


def test_a_key_of_no_rank_is_refused(world: World) -> None:
    keys = world.of.keys("own", ranks=range(SIZE), index=0)
    for key in ("0/9", "0/x"):
        with pytest.raises(PeerError, match="none of its ranks"):
            keys.get(key)


def test_keys_are_there_when_their_rank_has_set_them(world: World) -> None:
    first, second = (world.of.keys("own", ranks=range(SIZE), index=index) for index in (0, 1))
    assert not second.check(["0/0"])
    first.set("0/0", b"here")
    assert second.check(["0/0"])
    assert second.get("0/0") == b"here"
    first.leave()
    with pytest.raises(PeerError, match="over"):
        first.set("0/0", b"again")
