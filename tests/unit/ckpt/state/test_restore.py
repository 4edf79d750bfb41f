"""Restoring writes exactly the saved values in place, and refuses mismatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doubles.shards import MemoryShards, capture_world
from torch import nn

from holdfast.ckpt.errors import CorruptError, MismatchError, NotFoundError, StateError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.capture import CapturePlan, PerRank, flatten, gather_alone
from holdfast.ckpt.state.copying import copy_out
from holdfast.ckpt.state.hashing import state_hash
from holdfast.ckpt.state.local_boxes import FlatShard, TensorShard
from holdfast.ckpt.state.restore import restore
from holdfast.ckpt.state.saved import read_tensors
from holdfast.ckpt.testing.shards import capture


def saved(state: dict[str, Any], **options: Any) -> MemoryShards:
    return MemoryShards([capture(state, **options)])


def build(seed: int = 0, width: int = 4) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "weight_decay": 0.1},
            {"params": [*model[1].parameters(), *model[2].parameters()]},
        ],
        lr=0.1,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def train(state: dict[str, Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 3, generator=generator)).square().sum().backward()
    state["optimizer"].step()
    state["schedule"].step()


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(torch_dtypes.as_carrier(tensor.contiguous()).numpy().tobytes())


def test_training_goes_on_bit_for_bit_in_fresh_objects() -> None:
    state, other = build(1), build(2)
    for step in range(3):
        train(state, step)
    live = [p.data_ptr() for p in other["model"].parameters()]
    report = restore(other, saved(state, step=3), rank=0)
    assert (report.step, report.generation) == (3, 1)
    assert report.tensors == len(flatten(state).tensors)
    assert [p.data_ptr() for p in other["model"].parameters()] == live
    for step in range(3, 6):
        train(state, step)
        train(other, step)
    assert state_hash(state) == state_hash(other)


def test_going_back_to_a_state_without_moments_drops_them() -> None:
    state = build()
    start = saved(state)
    train(state, 0)
    restore(state, start, rank=0)
    assert not state["optimizer"].state
    assert state["optimizer"].param_groups[0]["lr"] == build()["optimizer"].param_groups[0]["lr"]


def test_moments_follow_their_parameter_and_not_its_position() -> None:
    state = build(1)
    train(state, 0)
    shards = saved({"model": state["model"], "optimizer": state["optimizer"]})
    model = build(2)["model"]
    swapped = torch.optim.AdamW(
        [
            {"params": [*reversed(list(model[2].parameters())), *model[1].parameters()]},
            {"params": list(model[0].parameters())},
        ]
    )
    restore({"model": model, "optimizer": swapped}, shards, rank=0)
    for name in ("0.weight", "2.weight", "2.bias"):
        old = state["optimizer"].state[state["model"].get_parameter(name)]
        new = swapped.state[model.get_parameter(name)]
        assert torch.equal(old["exp_avg"], new["exp_avg"])
    assert [g["weight_decay"] for g in swapped.param_groups] == [0.01, 0.1]


def test_regrouped_parameters_are_refused() -> None:
    state = build()
    shards = saved({"model": state["model"], "optimizer": state["optimizer"]})
    one_group = torch.optim.AdamW(state["model"].parameters())
    with pytest.raises(MismatchError, match="parameters of saved groups"):
        restore({"model": state["model"], "optimizer": one_group}, shards, rank=0)


def test_another_model_is_refused_before_anything_is_touched() -> None:
    state, other = build(0, width=4), build(1, width=5)
    before = state_hash(other)
    with pytest.raises(MismatchError, match=r"model\.0\.weight is float32 \[5, 3\], saved is"):
        restore(other, saved(state), rank=0)
    assert state_hash(other) == before


def test_missing_and_extra_entries_are_refused_unless_told_otherwise() -> None:
    shards = saved({"a": torch.ones(2), "gone": torch.ones(1), "n": 1, "lost": 2})
    live = {"a": torch.zeros(2), "new": torch.full((3,), 7.0), "n": 0, "fresh": 5}
    with pytest.raises(MismatchError) as caught:
        restore(live, shards, rank=0)
    for part in ("extra: gone", "missing: new", "value lost was saved", "value fresh was not"):
        assert part in str(caught.value)
    restore(live, shards, rank=0, strict=False)
    assert live["a"].sum() == 2
    assert live["new"].sum() == 21
    assert (live["n"], live["fresh"]) == (1, 5)


def test_a_flipped_byte_is_refused_with_the_name() -> None:
    index, payload = capture({"a": torch.ones(2), "b": torch.ones(2)})
    payload[index.tensors["b"].chunks[0].at] ^= 4
    with pytest.raises(CorruptError, match="b fails its checksum"):
        restore({"a": torch.ones(2), "b": torch.ones(2)}, MemoryShards([(index, payload)]), rank=0)


class Ledger:
    """A Stateful object whose state changes shape."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[str, torch.Tensor]] = {}
        self.rng = PerRank(torch.arange(3))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "rng": self.rng, "best": float("inf")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]
        self.rng = PerRank(state["rng"])
        self.best = state["best"]


def test_stateful_objects_get_their_structure_back() -> None:
    ledger, other = Ledger(), Ledger()
    ledger.rows = {5: ("five", torch.arange(5)), 1: ("one", torch.zeros(0, 3))}
    ledger.rng = PerRank(torch.arange(4))
    restore({"ledger": other}, saved({"ledger": ledger}), rank=0)
    assert list(other.rows) == [5, 1]
    assert other.rows[5][0] == "five"
    assert torch.equal(other.rows[5][1], torch.arange(5))
    assert other.rows[1][1].shape == (0, 3)
    assert torch.equal(other.rng.value, torch.arange(4))
    assert other.best == float("inf")


def test_plain_values_are_replaced_inside_the_containers_the_caller_holds() -> None:
    state = {"progress": {"epoch": 3, 7: [1]}, "seen": [1, 2], "n": 4, "deep": {"k": 1, "t": None}}
    live: dict[str, Any] = {"progress": {}, "seen": [9], "n": 0, "deep": {"k": 0, "t": 1}}
    progress, seen = live["progress"], live["seen"]
    restore(live, saved(state), rank=0)
    assert live == state
    assert live["progress"] is progress
    assert live["seen"] is seen


def test_per_rank_values_go_to_their_rank_and_new_ranks_keep_theirs() -> None:
    shards = []
    states = [{"rng": PerRank({"seed": r}), "w": torch.arange(4)} for r in range(2)]
    for rank, state in enumerate(states):
        shards.append(capture(state, rank=rank, world_size=2, gather=lambda mine: [mine, mine]))
    for rank, seed, kept in ((0, 0, ()), (1, 1, ()), (2, 9, ("rng",))):
        live = {"rng": PerRank({"seed": 9}), "w": torch.zeros(4, dtype=torch.int64)}
        report = restore(live, MemoryShards(shards), rank=rank)
        assert live["rng"].value == {"seed": seed}
        assert report.kept == kept


def test_tied_tensors_are_stored_once_and_restored_into_tied_and_untied_models() -> None:
    def pair(tied: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        if tied:
            model[1].weight = model[0].weight
        return model

    model, untied, tied = pair(True), pair(False), pair(True)
    shards = saved({"m": model})
    assert list(shards.indexes()[0].tensors) == ["m.0.weight"]
    restore({"m": untied}, shards, rank=0)
    restore({"m": tied}, shards, rank=0)
    assert torch.equal(untied[0].weight, model[0].weight)
    assert torch.equal(untied[1].weight, model[0].weight)
    assert torch.equal(tied[1].weight, model[0].weight)


@pytest.mark.parametrize("name", sorted(torch_dtypes.BY_NAME))
def test_every_dtype_comes_back_bit_for_bit(name: str) -> None:
    dtype = torch_dtypes.BY_NAME[name]
    raw = torch.randint(0, 2 if name == "bool" else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(2, 3) if dtype.itemsize > 1 else raw.view(2, 3).view(dtype)
    live = {"t": torch.zeros(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(2, 3)}
    restore(live, saved({"t": tensor}), rank=0)
    assert bits(live["t"]) == bits(tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1:3],
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[2, 3],
        lambda t: t.unsqueeze(1).expand(4, 3, 6),
        lambda t: t[:0],
        lambda t: torch.complex(t, t + 1).conj(),
        lambda t: torch.complex(t, t + 1).conj().imag,
    ],
)
def test_views_are_saved_as_their_own_elements(view: Any) -> None:
    tensor = view(torch.arange(24, dtype=torch.float32).reshape(4, 6))
    index, payload = capture({"t": tensor})
    assert len(payload) <= max(64, tensor.numel() * tensor.itemsize + 64)
    assert torch.equal(
        read_tensors(MemoryShards([(index, payload)]), ["t"])["t"], tensor.resolve_conj()
    )


def test_strided_targets_are_filled_in_place() -> None:
    base = torch.zeros(6, 4)
    restore({"t": base.t()}, saved({"t": torch.arange(24.0).reshape(4, 6)}), rank=0)
    assert torch.equal(base.t(), torch.arange(24.0).reshape(4, 6))


def test_regions_of_tensors_can_be_read() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    shards = saved({"t": whole, "s": torch.tensor(3.0)})
    box = Box(offset=(1, 2), shape=(2, 3))
    assert torch.equal(read_tensors(shards, ["t"], boxes={"t": box})["t"], whole[1:3, 2:5])
    assert read_tensors(shards, ["s", "t"])["s"] == 3
    with pytest.raises(NotFoundError, match="no tensor x"):
        read_tensors(shards, ["x"])
    with pytest.raises(MismatchError, match="outside"):
        read_tensors(shards, ["t"], boxes={"t": Box(offset=(3, 0), shape=(2, 6))})


def test_a_plan_is_used_again_until_the_state_changes_shape() -> None:
    state = build()
    plan = CapturePlan.build(flatten(state), rank=0, world_size=1, gather=gather_alone)
    assert not plan.change(flatten(state))
    train(state, 0)
    assert plan.change(flatten(state))
    plan = CapturePlan.build(flatten(state), rank=0, world_size=1, gather=gather_alone)
    train(state, 1)
    state["optimizer"].load_state_dict(state["optimizer"].state_dict())
    assert not plan.change(flatten(state))
    state["model"][0].weight.data = state["model"][0].weight.data.double()
    assert plan.change(flatten(state))


def test_a_plan_is_made_anew_when_values_names_or_groups_change() -> None:
    def plan_of(state: dict[str, Any]) -> CapturePlan:
        return CapturePlan.build(flatten(state), rank=0, world_size=1, gather=gather_alone)

    tensor, model = torch.ones(2), build()["model"]
    state = {"t": tensor, "n": 1, "m": {"k": [1]}}
    plan = plan_of(state)
    assert not plan.change(flatten(state | {"n": 2, "m": {"k": [1, 2], "l": 3}}))
    assert plan.change(flatten(state | {"new": 2}))
    assert plan.change(flatten(state | {"again": tensor}))
    both = {"model": model, "o": torch.optim.SGD(model.parameters())}
    plan = plan_of(both)
    assert not plan.change(flatten(both))
    half = {"model": model, "o": torch.optim.SGD(model[0].parameters())}
    assert plan.change(flatten(half))


def test_plain_values_and_tied_names_are_written_by_the_lowest_rank_that_has_them() -> None:
    tied = torch.ones(2)
    states = [
        {"t": torch.ones(2), "n": 1, "first": 0},
        {"n": 1, "late": {"deep": 2}, "u": tied, "v": tied},
        {"n": 1, "late": {"deep": 2}, "u": tied, "v": tied, "last": 3},
    ]
    shards = MemoryShards(capture_world(states))
    assert [sorted(index.values) for index in shards.indexes()] == [
        ["first", "n"],
        ["late"],
        ["last"],
    ]
    assert [index.aliases for index in shards.indexes()] == [{}, {"v": "u"}, {}]
    one = torch.zeros(2)
    live: dict[str, Any] = {
        "t": torch.zeros(2),
        "u": one,
        "v": one,
        "n": 0,
        "first": 1,
        "late": {},
        "last": 0,
    }
    restore(live, shards, rank=0)
    assert (live["first"], live["late"], live["last"], live["n"]) == (0, {"deep": 2}, 3, 1)


def test_buffers_and_loose_tensors_of_an_entry_are_written_by_one_rank() -> None:
    def state() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8))
        return {"model": model, "buf": {f"t{i}": torch.ones(50) for i in range(5)}}

    indexes = MemoryShards(capture_world([state() for _ in range(3)])).indexes()
    writers: dict[str, set[int]] = {}
    for index in indexes:
        for fqn, entry in index.tensors.items():
            kind = "buffer" if "running" in fqn or "batches" in fqn else fqn.partition(".")[0]
            if entry.chunks:
                writers.setdefault(kind, set()).add(index.writer)
    assert len(writers["buffer"]) == len(writers["buf"]) == 1
    assert len(writers["model"]) == 2


def test_a_tensor_of_which_no_rank_has_anything_is_refused() -> None:
    with pytest.raises(StateError, match="t: no rank holds any of it"):
        capture({"t": FlatShard(torch.ones(0), shape=(), start=0)})
    with pytest.raises(StateError, match="t: the ranks hold 0 elements"):
        capture({"t": FlatShard(torch.ones(0), shape=(3,), start=0)})


def test_overlapping_parts_are_refused() -> None:
    def part(first: int, count: int) -> dict[str, Any]:
        return {"t": TensorShard(torch.ones(count), shape=(6,), offset=(first,))}

    with pytest.raises(StateError, match=r"t: the ranks hold 5 elements of shape \(6,\)"):
        capture_world([part(0, 3), part(4, 2)])
    with pytest.raises(StateError, match=r"t: what the ranks hold of shape \[6\].*overlap"):
        capture_world([part(0, 4), part(3, 2)])


def test_ranks_that_hold_different_tensors_under_one_name_are_refused() -> None:
    def other(mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [mine, mine | {"tensors": [("t", "float32", (3,), [((0,), (3,))], "t")]}]

    with pytest.raises(StateError, match="t: rank 1 holds float32"):
        capture({"t": torch.ones(2)}, world_size=2, gather=other)


def test_room_of_the_wrong_size_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="bytes of room"):
        copy_out(torch.ones(3), memoryview(bytearray(8)))


def test_the_hash_sees_every_bit_and_every_value() -> None:
    state = {"t": torch.zeros(3), "n": 1}
    first = state_hash(state)
    assert state_hash({"n": 1, "t": torch.zeros(3)}) == first
    assert state_hash({"t": -torch.zeros(3), "n": 1}) != first
    assert state_hash({"t": torch.zeros(3), "n": 2}) != first
    assert state_hash({"t": torch.zeros(3, 1), "n": 1}) != first
