"""Plans of many ranks through circles: the same answers, and a late rank stops nobody for long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.snapshot.store_gather import StoreGather
from holdfast.ckpt.torch_private import PrefixStore
from holdfast.elastic.groups.circles import path_of, rings_of
from holdfast.elastic.groups.tree_plans import CircleGather, TreeGather

NODES = ["a", "a", "b", "b", "c", "c", "c"]


def gathers(store: HashStore) -> list[TreeGather]:
    rings = rings_of(NODES, fan_out=2)
    found = []
    for member in range(len(NODES)):
        path = []
        for ring, circle in path_of(member, rings).items():
            up, down = (
                StoreGather(
                    PrefixStore(f"{circle[0]}/{ring}/{way}", store),
                    rank=circle.index(member),
                    size=len(circle),
                    ranks=circle,
                )
                for way in ("up", "down")
            )
            path.append(CircleGather(leads=circle[0] == member, up=up, down=down))
        found.append(TreeGather(path, member=member, size=len(NODES)))
    return found


def together(members: list[TreeGather], values: list[Any]) -> list[Any]:
    def call(member: TreeGather, value: Any) -> Any:
        try:
            return member(value)
        except StateError as error:
            return str(error)

    with ThreadPoolExecutor(len(members)) as pool:
        calls = [pool.submit(call, *each) for each in zip(members, values, strict=True)]
        return [each.result(60) for each in calls]


def test_every_rank_gets_the_values_of_all_time_after_time() -> None:
    members = gathers(HashStore())
    for turn in range(3):
        values = [{"rank": member, "turn": turn} for member in range(len(NODES))]
        assert together(members, values) == [values] * len(NODES)


@pytest.mark.parametrize("late", [0, 3, 6])
def test_all_ranks_are_told_if_one_does_not_come(late: int) -> None:
    members = gathers(HashStore())
    together(members, [0] * len(NODES))
    for member in members:
        member.timeout_s = 1.0
    others = [member for number, member in enumerate(members) if number != late]
    said = together(others, [1] * len(others))
    assert all("begin to plan" in each or "gave up" in each for each in said), said
    assert any(f"rank {late} did not begin to plan" in each for each in said), said
    with pytest.raises(StateError, match="gave up"):
        members[late](1)
    for member in members:
        with pytest.raises(StateError, match="after an earlier failure"):
            member(2)
