"""A rank's own state comes back to the rank of its number, whatever the world was and is."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from doubles.shards import MemoryShards, capture_world
from torch import nn

from holdfast.ckpt.errors import ArgumentError, MismatchError
from holdfast.ckpt.state.capture import CapturePlan, flatten, gather_alone
from holdfast.ckpt.state.hashing import state_hash
from holdfast.ckpt.state.restore import RestoreReport, restore
from holdfast.ckpt.state.trees.per_rank import CarriedRanks, OnResize, PerRank
from holdfast.ckpt.testing.shards import capture


class Game:
    """An environment: a position, a picture of any size, and a generator of its own."""

    def __init__(self, rank: int) -> None:
        self.rank, self.turn = rank, 0
        self.picture = np.full((2, rank + 1), rank, np.uint8)
        self.rng = np.random.default_rng(rank)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "turn": self.turn,
            "picture": self.picture,
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rank, self.turn, self.picture = state["rank"], state["turn"], state["picture"]
        self.rng.bit_generator.state = state["rng"]


def world(size: int, on_resize: OnResize = "keep") -> list[dict[str, Any]]:
    return [
        {
            "w": torch.arange(4),
            "game": PerRank(Game(rank), on_resize=on_resize),
            "carried": CarriedRanks(),
        }
        for rank in range(size)
    ]


def resized(
    states: list[dict[str, Any]], size: int, on_resize: OnResize = "keep"
) -> tuple[list[dict[str, Any]], list[RestoreReport]]:
    """Return the states of a new world, restored from the old one's, each game built anew first."""
    shards = MemoryShards(capture_world(states))
    fresh = world(size, on_resize)
    for state in fresh:
        state["game"].value.rank = 100
    reports = [
        restore(state, shards, rank=rank, world_size=size) for rank, state in enumerate(fresh)
    ]
    return fresh, reports


def ranks_of(states: list[dict[str, Any]]) -> list[int]:
    return [state["game"].value.rank for state in states]


def test_every_rank_gets_its_own_back_bit_for_bit() -> None:
    before = world(3)
    for rank, state in enumerate(before):
        state["game"].value.turn = 10 * rank
        state["game"].value.rng.random(rank)
    drawn = [state["game"].value.rng.bit_generator.state for state in before]
    after, reports = resized(before, 3)
    assert ranks_of(after) == [0, 1, 2]
    assert [state["game"].value.turn for state in after] == [0, 10, 20]
    assert [state["game"].value.picture.shape for state in after] == [(2, 1), (2, 2), (2, 3)]
    assert [state["game"].value.rng.bit_generator.state for state in after] == drawn
    assert all(report.ranks.taken == ("game",) and not report.kept for report in reports)


def test_the_values_of_ranks_that_go_are_carried_and_come_back_with_them() -> None:
    two, reports = resized(world(4), 2)
    assert ranks_of(two) == [0, 1]
    assert [report.ranks.carried for report in reports] == [("game@2",), ("game@3",)]
    one, _ = resized(two, 1)
    assert sorted(one[0]["carried"].values) == ["game@1", "game@2", "game@3"]
    again, reports = resized(one, 3)
    assert ranks_of(again) == [0, 1, 2]
    assert again[2]["game"].value.picture.tolist() == [[2, 2, 2], [2, 2, 2]]
    assert [report.ranks.carried for report in reports] == [("game@3",), (), ()]
    assert not again[1]["carried"].values


def test_a_new_rank_keeps_what_it_was_built_with_and_the_report_says_so() -> None:
    after, reports = resized(world(2), 3)
    assert ranks_of(after) == [0, 1, 100]
    assert [report.kept for report in reports] == [(), (), ("game",)]


def test_dropped_values_are_named_at_every_rank() -> None:
    after, reports = resized(world(3), 1, "drop")
    assert ranks_of(after) == [0]
    assert reports[0].ranks.dropped == ("game@1", "game@2")
    assert not after[0]["carried"].values


def test_without_a_place_to_carry_them_values_are_dropped() -> None:
    shards = MemoryShards(capture_world(world(2)))
    state = {key: value for key, value in world(1)[0].items() if key != "carried"}
    assert restore(state, shards, rank=0, world_size=1).ranks.dropped == ("game@1",)


def test_a_merge_gets_all_values_in_rank_order_and_gives_each_rank_its_share() -> None:
    def share(values: list[Any], rank: int, world_size: int) -> Any:
        turns = [value["rank"] for value in values]
        return values[rank] | {"turn": 1000 * world_size + sum(turns[rank::world_size])}

    after, reports = resized(world(5, share), 2, share)
    assert ranks_of(after) == [0, 1]
    assert [state["game"].value.turn for state in after] == [2000 + 0 + 2 + 4, 2000 + 1 + 3]
    assert all(report.ranks.merged == ("game",) for report in reports)
    same, reports = resized(after, 2, share)
    assert [state["game"].value.turn for state in same] == [2006, 2004]
    assert all(report.ranks.merged == () for report in reports)


def restored(state: dict[str, Any], fresh: dict[str, Any]) -> RestoreReport:
    return restore(fresh, MemoryShards([capture(state)]), rank=0)


def test_tensors_arrays_lists_and_dicts_are_filled_in_place() -> None:
    tensor, array, rows = torch.arange(3.0), np.arange(4), [1, {"n": 2}]
    counts = Counter(a=2)
    old = {"t": PerRank(tensor), "a": PerRank(array), "mix": PerRank({"rows": rows, "c": counts})}
    mine, other = torch.zeros(3), np.zeros(4, int)
    inner: dict[str, int] = {}
    items: list[Any] = [0, inner]
    many: Counter[str] = Counter(z=9)
    new = {
        "t": PerRank(mine),
        "a": PerRank(other),
        "mix": PerRank({"rows": items, "c": many}),
    }
    restored(old, new)
    assert torch.equal(mine, tensor)
    assert (other == array).all()
    assert (items, inner, many) == ([1, {"n": 2}], {"n": 2}, {"a": 2})
    assert items[1] is inner
    assert (new["t"].value is mine, new["a"].value is other) == (True, True)


def test_a_number_replaces_the_value_of_its_holder() -> None:
    fresh = PerRank(0)
    restored({"n": PerRank(np.float32(2.5))}, {"n": fresh})
    assert type(fresh.value) is np.float32
    assert fresh.value == 2.5


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(2, generator=g).tolist()),
        (lambda: np.random.default_rng(1), lambda g: g.random(2).tolist()),
        (lambda: np.random.Generator(np.random.MT19937(1)), lambda g: g.random(2).tolist()),
        (lambda: np.random.RandomState(1), lambda g: g.normal(size=3).tolist()),
        (lambda: random.Random(1), lambda g: [g.random(), g.gauss(0, 1)]),
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_generators_go_on_where_they_were(make: Any, draw: Any, own: bool) -> None:
    old, new = make(), make()
    draw(old)
    shards = MemoryShards([capture({"g": PerRank(old) if own else old})])
    wanted = draw(old)
    restore({"g": PerRank(new) if own else new}, shards, rank=0)
    assert draw(new) == wanted


def test_modules_and_optimizers_may_belong_to_one_rank() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 1)
        return model, torch.optim.Adam(model.parameters())

    (model, optimizer), (other, theirs) = build(), build()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    restored(
        {"m": PerRank(model), "o": PerRank(optimizer)}, {"m": PerRank(other), "o": PerRank(theirs)}
    )
    assert torch.equal(other.weight, model.weight)
    assert str(theirs.state_dict()) == str(optimizer.state_dict())


def test_inside_an_object_it_is_given_back_as_a_value() -> None:
    class Sampler:
        def __init__(self) -> None:
            self.mine = torch.zeros(2)

        def state_dict(self) -> dict[str, Any]:
            return {"mine": PerRank(self.mine), "all": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.mine = state["mine"]

    old = [Sampler() for _ in range(2)]
    old[1].mine += 5
    shards = MemoryShards(capture_world([{"s": sampler} for sampler in old]))
    new = [Sampler() for _ in range(3)]
    new[2].mine += 7
    for rank, sampler in enumerate(new):
        restore({"s": sampler}, shards, rank=rank)
    assert [sampler.mine.tolist() for sampler in new] == [[0, 0], [5, 5], [7, 7]]


def test_it_may_grow_at_one_rank_without_asking_the_others() -> None:
    def never(_: Any) -> list[Any]:
        raise AssertionError("no exchange is needed")

    state: dict[str, Any] = {"w": torch.ones(2), "mine": PerRank({"rows": [torch.ones(1)]})}
    plan = CapturePlan.build(flatten(state), rank=0, world_size=1, gather=gather_alone)
    before = plan.payload_bytes
    state["mine"].value["rows"].append(torch.ones(1000))
    flat = flatten(state)
    assert plan.change(flat) == ""
    grown = plan.with_own(flat)
    assert grown.payload_bytes >= before + 4000
    room = bytearray(grown.payload_bytes)
    index = grown.write(flat, memoryview(room), step=1)
    fresh: dict[str, Any] = {"w": torch.zeros(2), "mine": PerRank({"rows": []})}
    restore(fresh, MemoryShards([(index, room)]), rank=0)
    assert [row.shape for row in fresh["mine"].value["rows"]] == [(1,), (1000,)]


def test_a_loose_tensor_of_another_shape_is_refused() -> None:
    live = {"t": PerRank(torch.zeros(2)), "u": torch.zeros(1)}
    with pytest.raises(MismatchError, match=r"t of this rank is float32 \[2\], .*keep one that"):
        restored({"t": PerRank(torch.ones(3)), "u": torch.ones(1)}, live)
    assert live["u"].tolist() == [0.0]
    with pytest.raises(MismatchError, match=r"t of this rank is float32 \[2\], saved is no tensor"):
        restored({"t": PerRank(5)}, {"t": PerRank(torch.zeros(2))})


def test_a_saved_value_that_nobody_wants_is_extra() -> None:
    with pytest.raises(MismatchError, match="extra: per-rank value t was saved"):
        restored({"t": PerRank(torch.ones(3))}, {})
    report = restore(
        {}, MemoryShards([capture({"t": PerRank(torch.ones(3))})]), rank=0, strict=False
    )
    assert report.extra == ("t",)


def test_values_of_older_checkpoints_are_read_by_their_writer() -> None:
    index, payload = capture({"rng": PerRank(0), "w": torch.ones(1)})
    data = {"$data": {"$bytes": "AQID", "dtype": "uint8", "shape": [3]}}
    old = type(index)(
        **{name: getattr(index, name) for name in index.__struct_fields__}
        | {"rank_values": {"rng": {"state": data}}}
    )
    fresh = {"rng": PerRank({"state": torch.zeros(3, dtype=torch.uint8)}), "w": torch.ones(1)}
    restore(fresh, MemoryShards([(old, payload)]), rank=0)
    assert fresh["rng"].value["state"].tolist() == [1, 2, 3]


def test_the_hash_of_a_state_leaves_it_out() -> None:
    states = [{"w": torch.ones(2), "own": PerRank(torch.full((3,), r))} for r in range(2)]
    assert state_hash(states[0]) == state_hash(states[1])


def test_another_rule_is_refused() -> None:
    with pytest.raises(ArgumentError, match="on_resize='merge'"):
        PerRank(1, on_resize="merge")  # type: ignore[arg-type]
