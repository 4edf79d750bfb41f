"""A watched state is flattened exactly as a state that is seen for the first time.

The same live state is flattened by a `ChangeWatch` that has seen it before and by a plain
``flatten``. The results must not differ in a name, a value or a bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.slots import FakeSidecar
from exploring import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.geometry.shard_index import decode_index, encode_index
from holdfast.ckpt.snapshot.change_watch import ChangeWatch
from holdfast.ckpt.snapshot.copy_job import CopyJob
from holdfast.ckpt.snapshot.copy_program import PayloadBuffer
from holdfast.ckpt.snapshot.pacing import FULL_SPEED
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.capture import CapturePlan, gather_alone
from holdfast.ckpt.state.flatten import FlatState, flatten
from holdfast.ckpt.state.local_boxes import FlatShard, Leaf, TensorShard, local_boxes_of, spec_of
from holdfast.ckpt.state.torch_dtypes import as_carrier
from holdfast.ckpt.state.trees.per_rank import PerRank

STEPS = 12


class Fresh:
    """A Stateful whose tree is new, tensors and all, whenever it is asked for."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {"count": 0, "mean": torch.zeros(3), "mine": PerRank(1)}

    def state_dict(self) -> dict[str, Any]:
        return {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self.tree.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tree = state


class OwnTensors(Fresh):
    """A Stateful that gives its own tensors."""

    def state_dict(self) -> dict[str, Any]:
        return self.tree


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("window", torch.zeros(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.note = 0

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def make_state() -> dict[str, Any]:
    model = nn.Sequential(Block(), Block())
    loose = nn.Parameter(torch.rand(2, 3))
    parts = nn.Parameter(torch.rand(2))
    owned = [*model.parameters(), loose, parts]
    return {
        "model": model,
        "expert": TensorShard(loose, shape=(4, 3), offset=(2, 0)),
        "range": FlatShard(parts, shape=(1, 5), start=1),
        "optimizer": torch.optim.AdamW(owned, lr=0.1),
        "fresh": Fresh(),
        "held": OwnTensors(),
        "rng": PerRank(torch.get_rng_state()[:16]),
        "game": PerRank({"board": np.zeros(3), "rng": random.Random(0), "fresh": Fresh()}),
        "array": np.arange(4.0),
        "seen": [0, {"deep": (1, 2.5)}],
        "mixed": {"tensor": torch.zeros(2), "word": "a", "list": [torch.ones(1), 3]},
        "n": 1,
    }


Act = Callable[[dict[str, Any], random.Random], object]


def block(state: dict[str, Any], rng: random.Random) -> Any:
    return rng.choice(list(state["model"]))


def anything(state: dict[str, Any], rng: random.Random) -> torch.Tensor:
    return rng.choice(list(state["model"].parameters()))


def train(state: dict[str, Any], rng: random.Random) -> None:
    for parameter in state["optimizer"].param_groups[0]["params"]:
        if rng.random() < 0.7:
            parameter.grad = torch.rand_like(parameter)
    state["optimizer"].step()


def regroup(state: dict[str, Any], rng: random.Random) -> None:
    """Tell the optimizer of parameters that were replaced; forget the states of the old ones."""
    optimizer = state["optimizer"]
    others = [state["expert"].tensor, state["range"].tensor]
    optimizer.param_groups[0]["params"] = [*state["model"].parameters(), *others]
    known = set(optimizer.param_groups[0]["params"])
    for parameter in [p for p in optimizer.state if p not in known]:
        del optimizer.state[parameter]


def replace_parameter(state: dict[str, Any], rng: random.Random) -> None:
    target = block(state, rng)
    shape = rng.choice([(2, 3), (4, 3)])
    target.linear.weight = nn.Parameter(torch.rand(shape))
    regroup(state, rng)


def add_module(state: dict[str, Any], rng: random.Random) -> None:
    block(state, rng).add_module(f"more{rng.randrange(3)}", nn.Linear(1, 1))
    regroup(state, rng)


def remove_module(state: dict[str, Any], rng: random.Random) -> None:
    target = block(state, rng)
    for name in [name for name in target._modules if name.startswith("more")]:
        delattr(target, name)
    regroup(state, rng)


def tie(state: dict[str, Any], rng: random.Random) -> None:
    first, second = state["model"]
    second.linear.weight = first.linear.weight
    regroup(state, rng)


def swap_data(state: dict[str, Any], rng: random.Random) -> None:
    parameter = anything(state, rng)
    how = rng.choice(["clone", "double", "transpose", "narrow", "half"])
    if how == "clone":
        parameter.data = parameter.data.clone()
    elif how == "double":
        parameter.data = parameter.data.double()
    elif how == "half":
        parameter.data = parameter.data.bfloat16()
    elif how == "transpose" and parameter.ndim == 2:
        parameter.data = parameter.data.T.contiguous().T
    elif how == "narrow" and len(parameter) > 1:
        parameter.data = parameter.data[:-1]
    state["optimizer"].state.pop(parameter, None)
    for each in state["model"].parameters():
        each.grad = None


def change_buffer(state: dict[str, Any], rng: random.Random) -> None:
    target = block(state, rng)
    how = rng.choice(["write", "new", "resize", "hide", "show", "drop"])
    if how == "write":
        target.window.add_(1)
    elif how == "new":
        target.window = torch.rand(4)
    elif how == "resize":
        target.window = torch.rand(rng.randrange(1, 6))
    elif how == "hide":
        target._non_persistent_buffers_set.add("window")
    elif how == "show":
        target._non_persistent_buffers_set.discard("window")
    else:
        target.norm.num_batches_tracked = None


def change_optimizer(state: dict[str, Any], rng: random.Random) -> None:
    optimizer = state["optimizer"]
    how = rng.choice(["lr", "key", "plain", "clear", "number", "tensor-lr"])
    entries = [entry for entry in optimizer.state.values() if entry]
    if how == "lr":
        optimizer.param_groups[0]["lr"] = rng.random()
    elif how == "tensor-lr":
        optimizer.param_groups[0]["lr"] = torch.tensor(rng.random())
    elif how == "key":
        optimizer.param_groups[0]["warm"] = rng.randrange(3)
    elif how == "clear":
        optimizer.state.clear()
    elif entries and how == "plain":
        rng.choice(entries)["note"] = rng.randrange(1000, 9999)
    elif entries:
        rng.choice(entries)["extra"] = torch.rand(2, 2)[:, 0]


def change_trees(state: dict[str, Any], rng: random.Random) -> None:
    tree = rng.choice([state["fresh"], state["held"]]).tree
    how = rng.choice(["count", "mean", "shape", "key", "share", "alias", "rank", "drop"])
    if how == "count":
        tree["count"] += 1
    elif how == "mean":
        tree["mean"] = torch.rand(3)
    elif how == "shape":
        tree["mean"] = torch.rand(rng.randrange(1, 4), 2)
    elif how == "key":
        tree[f"key{rng.randrange(2)}"] = rng.choice([1, "x", torch.ones(1)])
    elif how == "share":
        tree["again"] = tree["mean"]
    elif how == "alias":
        state["held"].tree["mean"] = state["model"][0].window
    elif how == "rank":
        tree["mine"] = PerRank(rng.randrange(9))
    else:
        tree.pop("again", None)


def change_own(state: dict[str, Any], rng: random.Random) -> None:
    own, how = state["game"].value, rng.choice(["play", "draw", "grow", "swap", "array", "new"])
    if how == "play":
        own["board"][rng.randrange(3)] += 1
    elif how == "draw":
        own["rng"].random()
    elif how == "grow":
        own["board"] = np.zeros(rng.randrange(3, 9))
    elif how == "swap":
        own["rng"] = random.Random(rng.randrange(9))
    elif how == "array":
        state["array"][rng.randrange(4)] = rng.random()
    else:
        state["array"] = np.arange(float(rng.randrange(4, 6)))


def change_values(state: dict[str, Any], rng: random.Random) -> None:
    how = rng.choice(["n", "kind", "deep", "rng", "mixed", "list", "key", "order"])
    if how == "n":
        state["n"] = rng.randrange(10**6)
    elif how == "kind":
        state["n"] = rng.choice([None, "text", torch.ones(2), {"a": 1}, {"a": torch.ones(1)}])
    elif how == "deep":
        state["seen"][1]["deep"] = rng.choice([(2,), [3.0], float("inf")])
    elif how == "rng":
        state["rng"].value = torch.randint(0, 9, (16,), dtype=torch.uint8)
    elif how == "mixed":
        state["mixed"]["word"] = rng.choice(["b", 2, torch.zeros(1)])
    elif how == "list":
        state["mixed"]["list"].append(rng.choice([1, torch.zeros(1)]))
    elif how == "key":
        state[f"new{rng.randrange(2)}"] = rng.choice([1, torch.zeros(2)])
    else:
        state["n"] = state.pop("n")


def freeze(state: dict[str, Any], rng: random.Random) -> None:
    parameter = anything(state, rng)
    parameter.requires_grad_(not parameter.requires_grad)


ACTS: list[Act] = [
    train,
    train,
    replace_parameter,
    add_module,
    remove_module,
    tie,
    swap_data,
    change_buffer,
    change_optimizer,
    change_trees,
    change_own,
    change_values,
    freeze,
]


def bytes_of(fqn: str, leaf: Leaf) -> Any:
    """Return the kind of a tensor and its values, box by box."""
    boxes = [
        (each.box, as_carrier(each.local.contiguous()).numpy().tobytes())
        for each in local_boxes_of(fqn, leaf)
    ]
    return spec_of(fqn, leaf), boxes


def described(take: Callable[[], FlatState]) -> Any:
    """Return all that a snapshot takes from a flat state, bytes included; or the refusal."""
    try:
        flat = take()
    except StateError as error:
        return str(error)
    return {
        "tensors": {fqn: bytes_of(fqn, leaf) for fqn, leaf in flat.tensors.items()},
        "names": list(flat.tensors),
        "volatile": flat.volatile,
        "values": flat.values,
        "ranks": flat.rank_values,
        "aliases": flat.aliases,
        "keys": {name: parts.keys for name, parts in flat.optimizers.items()},
        "groups": {n: list(p.described(flat.values)) for n, p in flat.optimizers.items()},
    }


@pytest.mark.parametrize("always_new", [False, True])
@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    acts=st.lists(st.sampled_from(ACTS), max_size=STEPS),
    first=st.sampled_from(["model", "held"]),
)
@example(seed=288954, acts=[change_trees, change_trees], first="model")
@example(seed=288954, acts=[change_trees, change_trees], first="held")
def test_a_watched_state_is_flattened_as_a_new_one(
    always_new: bool, seed: int, acts: list[Act], first: str
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    whole, watch = make_state(), ChangeWatch()
    state = {first: whole[first]} | whole
    described(lambda: watch.flatten(state)[0])
    for act in acts:
        act(state, rng)
        given_state = dict(state) if always_new else state
        found = described(lambda: watch.flatten(given_state)[0])  # noqa: B023 - called at once
        assert found == described(lambda: flatten(given_state))  # noqa: B023


def test_tensors_of_an_object_that_were_one_and_are_two_are_found() -> None:
    state, watch = make_state(), ChangeWatch()
    tree = state["held"].tree
    tree["again"] = tree["mean"]
    watch.flatten(state)
    tree["mean"] = torch.rand(3)
    found = described(lambda: watch.flatten(state)[0])
    assert found == described(lambda: flatten(state))
    assert "held.again" in found["names"]


def test_a_tensor_that_others_share_with_an_object_is_found_when_that_gets_another() -> None:
    owner, norm = OwnTensors(), nn.BatchNorm1d(3)
    norm.running_mean = owner.tree["mean"]
    owner.tree["scale"] = norm.weight
    state = {"held": owner, "loose": owner.tree["mean"], "norm": norm}
    for name in ("mean", "scale"):
        watch = ChangeWatch()
        watch.flatten(state)
        owner.tree[name] = torch.rand(3)
        found = described(lambda: watch.flatten(state)[0])  # noqa: B023 - called at once
        assert found == described(lambda: flatten(state))
    assert {"loose", "norm.weight"} <= set(found["names"])


def test_a_parameter_that_only_its_optimizer_still_holds_is_refused() -> None:
    owner, watch = OwnTensors(), ChangeWatch()
    owner.tree["scale"] = nn.Parameter(torch.zeros(3))
    state = {"held": owner, "optimizer": torch.optim.SGD([owner.tree["scale"]], lr=0.1)}
    watch.flatten(state)
    owner.tree["scale"] = torch.rand(3)
    with pytest.raises(StateError, match="belongs to no module of the state"):
        watch.flatten(state)


def test_steps_of_training_change_nothing_that_has_to_be_found_again() -> None:
    state, watch, rng = make_state(), ChangeWatch(), random.Random(0)
    for parameter in state["optimizer"].param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()
    assert not watch.flatten(state)[1]
    for _ in range(3):
        train(state, rng)
        state["model"][0].window.add_(1)
        state["held"].tree["count"] += 1
        state["fresh"].tree["mean"].add_(1)
        state["seen"][0] += 1
        state["rng"].value = torch.randint(0, 9, (16,), dtype=torch.uint8)
        state["optimizer"].param_groups[0]["lr"] *= 0.5
        freeze(state, rng)
        assert watch.flatten(state)[1]


def content(text: bytes, payload: bytes) -> Any:
    """Return what an index and its payload say, whatever the order they are in."""
    index = decode_index(text, origin="test")
    tensors = {
        fqn: (
            entry.dtype,
            entry.shape,
            [(c.box, c.crc32c, payload[c.at : c.at + c.nbytes]) for c in entry.chunks],
        )
        for fqn, entry in index.tensors.items()
    }
    return tensors, index.values, index.rank_values, index.aliases


def cached(snapshotter: Snapshotter, state: dict[str, Any]) -> Any:
    """Copy ``state`` as the next snapshot would."""
    flat, program = snapshotter._programmed(state, 1)
    program.stage(flat, step=0)
    job, found = CopyJob(program, ready={}), bytearray(program.plan.payload_bytes)
    job.open(PayloadBuffer.of(memoryview(found)))
    sums = job.run(speed=FULL_SPEED)
    crcs = program.parts.of_ranges(sums).tolist()
    text = program.plan.index_text(flat, crcs, run="r", step=1, generation=1)
    return content(text, bytes(found))


def fresh(state: dict[str, Any]) -> Any:
    """Copy ``state`` as if it were seen for the first time."""
    flat = flatten(state)
    plan = CapturePlan.build(flat, rank=0, world_size=1, gather=gather_alone)
    found = bytearray(plan.payload_bytes)
    index = plan.write(flat, memoryview(found), run="r", step=1, generation=1)
    return content(encode_index(index), bytes(found))


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except StateError as error:
        return str(error)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32), acts=st.lists(st.sampled_from(ACTS), max_size=STEPS))
def test_a_cached_capture_equals_a_fresh_one_bit_for_bit(seed: int, acts: list[Act]) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    state = make_state()
    # Alone in the world, a part has to be the whole.
    state["expert"] = TensorShard(state["expert"].tensor, shape=(2, 3), offset=(0, 0))
    state["range"] = FlatShard(state["range"].tensor, shape=(1, 2), start=0)
    snapshotter = Snapshotter(
        FakeSidecar(directory=Path()),
        run="r",
        generation=1,
        rank=0,
        world_size=1,
        gather=gather_alone,
    )
    try:
        for act in [train, *acts]:
            act(state, rng)
            found = outcome(lambda: cached(snapshotter, state))
            assert found == outcome(lambda: fresh(state))
    finally:
        snapshotter.close()
