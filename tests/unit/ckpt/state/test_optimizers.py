"""Optimizer state is keyed by parameter name, for any optimizer, grouping and set of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.shards import MemoryShards, capture_world
from fake_ranks import rank_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast import ckpt
from holdfast.ckpt.errors import MismatchError, StateError
from holdfast.ckpt.state.capture import flatten
from holdfast.ckpt.state.hashing import state_hash
from holdfast.ckpt.state.local_boxes import FlatShard, TensorShard
from holdfast.ckpt.state.optimizers import merge_groups
from holdfast.ckpt.state.restore import restore
from holdfast.ckpt.testing.shards import capture

State = dict[str, Any]


def saved(state: State) -> MemoryShards:
    return MemoryShards([capture(state, step=1)])


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(state: State, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(5, 3, generator=generator)).square().sum().backward()
        state["optimizer"].step()


class Odd(torch.optim.Optimizer):
    """Keeps plain numbers, nothing, and nested plain values as state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "window": (1, 2)})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["history"] = [*state.get("history", []), {"at": (state["count"], 0.5)}]
                    state["none"] = None
                    parameter.sub_(group["lr"] * parameter.grad / state["count"])


MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "odd": Odd,
}


def build(name: str, seed: int) -> State:
    model = net(seed)
    return {"model": model, "optimizer": MAKERS[name](model.parameters())}


@pytest.mark.parametrize("name", MAKERS)
def test_training_goes_on_bit_for_bit_in_a_fresh_optimizer(name: str) -> None:
    state, other = build(name, 1), build(name, 2)
    train(state)
    restore(other, saved(state), rank=0)
    assert state_hash(other) == state_hash(state)
    train(state, 3)
    train(other, 3)
    assert state_hash(other) == state_hash(state)


def test_factored_moments_have_shapes_of_their_own() -> None:
    state = build("adafactor", 1)
    train(state)
    shapes = {fqn: tuple(t.shape) for fqn, t in flatten(state).tensors.items()}
    assert shapes["optimizer.state.model.0.weight.row_var"] == (4, 1)
    assert shapes["optimizer.state.model.0.weight.col_var"] == (1, 3)
    assert shapes["optimizer.state.model.0.weight.step"] == ()


def sharded(mesh: Any, full: nn.Module, placements: list[Any]) -> nn.Module:
    model = net(9)
    for child, source in zip(model, full, strict=True):
        for key, parameter in source.named_parameters():
            place = placements if parameter.ndim > 1 else [Replicate()]
            local = distribute_tensor(parameter.detach(), mesh, place, src_data_rank=None)
            setattr(child, key, nn.Parameter(local))
    return model


@pytest.mark.parametrize("dim", [0, 1])
def test_factored_moments_of_sharded_parameters_are_made_where_torch_makes_them(dim: int) -> None:
    state = build("adafactor", 1)
    train(state)
    shards = saved(state)
    for rank in range(2):
        with rank_of(rank, (2,)) as mesh:
            model = sharded(mesh, net(2), [Shard(dim)])
            live: State = {"model": model, "optimizer": torch.optim.Adafactor(model.parameters())}
            restore(live, shards, rank=rank)
            weight, old = model[0].weight, state["model"][0].weight
            row = live["optimizer"].state[weight]["row_var"]
            assert isinstance(row, DTensor)
            assert row.placements == weight.detach().new_zeros((4, 1)).placements
            assert torch.equal(row.to_local(), state["optimizer"].state[old]["row_var"])
            assert torch.equal(weight.to_local(), old.chunk(2, dim)[rank])


def test_moments_of_sharded_parameters_are_sharded_as_they_are() -> None:
    state = build("adamw", 1)
    train(state)
    shards = saved(state)
    for rank in range(2):
        with rank_of(rank, (2,)) as mesh:
            model = sharded(mesh, net(2), [Shard(0)])
            live: State = {
                "model": model,
                "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True),
            }
            restore(live, shards, rank=rank)
            moment = live["optimizer"].state[model[0].weight]["exp_avg"]
            assert moment.placements == (Shard(0),)
            want = state["optimizer"].state[state["model"][0].weight]["exp_avg"]
            assert torch.equal(moment.to_local(), want.chunk(2)[rank])


def test_a_frozen_parameter_that_the_optimizer_has_can_be_unfrozen_and_back() -> None:
    frozen, open_ = build("adamw", 1), build("adamw", 2)
    frozen["model"][0].requires_grad_(False)
    train(frozen)
    train(open_)
    assert len(frozen["optimizer"].state) == 2
    restore(open_, saved(frozen), rank=0)
    assert len(open_["optimizer"].state) == 2
    train(open_)
    assert len(open_["optimizer"].state) == 4
    restore(frozen, saved(open_), rank=0)
    assert state_hash(frozen) == state_hash(open_)


def trained_only(seed: int, *, frozen: bool) -> State:
    model = net(seed)
    model[0].requires_grad_(not frozen)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return {"model": model, "optimizer": torch.optim.AdamW(trainable, lr=0.1 * seed)}


def test_a_frozen_parameter_that_the_optimizer_has_not_is_a_missing_key() -> None:
    frozen, live = trained_only(1, frozen=True), trained_only(2, frozen=False)
    train(frozen)
    shards = saved(frozen)
    with pytest.raises(MismatchError, match=r"no saved state for model\.0\.weight"):
        restore(live, shards, rank=0)
    unfrozen = {"optimizer.state.model.0.*": "ignore-missing"}
    report = restore(live, shards, rank=0, strict=unfrozen)
    assert report.missing == ("optimizer.state.model.0.weight", "optimizer.state.model.0.bias")
    train(live)
    steps = {fqn: t.item() for fqn, t in flatten(live).tensors.items() if fqn.endswith("step")}
    assert sorted(steps.values()) == [2, 2, 4, 4]
    again = trained_only(3, frozen=True)
    with pytest.raises(MismatchError, match=r"saved with parameter model\.0\.bias"):
        restore(again, saved(live), rank=0)
    report = restore(again, saved(live), rank=0, strict="ignore-extra")
    assert "optimizer.state.model.0.weight" in report.extra


def test_state_of_a_part_is_a_part() -> None:
    def rank_state(rank: int, seed: int) -> State:
        torch.manual_seed(seed)
        full = torch.randn(4, 3)
        local = nn.Parameter(full[2 * rank : 2 * rank + 2].clone())
        line = nn.Parameter(torch.randn(7)[[slice(0, 3), slice(3, 7)][rank]].clone())
        optimizer = torch.optim.AdamW([local, line])
        local.grad, line.grad = local.detach().clone(), line.detach().clone()
        optimizer.step()
        return {
            "w": TensorShard(local, shape=(4, 3), offset=(2 * rank, 0)),
            "v": FlatShard(line, shape=(7,), start=3 * rank),
            "optimizer": optimizer,
        }

    states = [rank_state(rank, 1) for rank in range(2)]
    shards = MemoryShards(capture_world(states))
    w, v = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(7))
    whole = {"w": w, "v": v, "optimizer": torch.optim.AdamW([w, v])}
    restore(whole, shards, rank=0)
    moments = [s["optimizer"].state[s["w"].tensor]["exp_avg"] for s in states]
    assert torch.equal(whole["optimizer"].state[w]["exp_avg"], torch.cat(moments))
    lines = [s["optimizer"].state[s["v"].tensor]["exp_avg_sq"] for s in states]
    assert torch.equal(whole["optimizer"].state[v]["exp_avg_sq"], torch.cat(lines))
    other = rank_state(1, 2)
    other["optimizer"].state.clear()
    restore(other, saved(whole), rank=0)
    assert torch.equal(other["optimizer"].state[other["w"].tensor]["exp_avg"], moments[1])
    assert torch.equal(other["optimizer"].state[other["v"].tensor]["exp_avg_sq"], lines[1])


def test_factored_state_of_a_part_is_refused() -> None:
    local = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.Adafactor([local])
    local.grad = torch.ones(2, 3)
    optimizer.step()
    state = {"w": TensorShard(local, shape=(4, 3), offset=(0, 0)), "optimizer": optimizer}
    with pytest.raises(
        StateError, match=r"optimizer\.state\.w\.row_var: a state of shape \[2, 1\]"
    ):
        flatten(state)
    whole = nn.Parameter(torch.ones(4, 3))
    factored = torch.optim.Adafactor([whole])
    whole.grad = torch.ones(4, 3)
    factored.step()
    optimizer.state.clear()
    with pytest.raises(MismatchError, match=r"row_var: saved with shape \[4, 1\].*cannot be known"):
        restore(state, saved({"w": whole, "optimizer": factored}), rank=0, strict="ignore")


def test_groups_of_all_ranks_are_put_together() -> None:
    offers = [
        {"o.groups.0": {"params": ["a", "b"], "hypers": {"lr": 1}}},
        {
            "o.groups.0": {"params": ["b", "c"], "hypers": {"lr": 1}},
            "o.groups.1": {"params": ["d"], "hypers": {"lr": 2}},
        },
    ]
    assert merge_groups(offers) == {
        "o.groups.0.params": ["a", "b", "c"],
        "o.groups.1.params": ["d"],
    }
    offers[1]["o.groups.0"]["hypers"] = {"lr": 3}
    with pytest.raises(StateError, match=r"o\.groups\.0\.lr: 1 at rank 0, 3 at rank 1"):
        merge_groups(offers)


def stage(first: int, last: int, *, lr: float = 0.1) -> State:
    """Some layers of eight, with two groups of which a stage may have nothing."""
    torch.manual_seed(first)
    model = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(first, last)})
    early = [p for name, p in model.named_parameters() if int(name[0]) < 2]
    late = [p for name, p in model.named_parameters() if int(name[0]) >= 2]
    groups = [{"params": early, "weight_decay": 0.5}, {"params": late}]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_pipeline_stages_load_into_one_and_into_others() -> None:
    stages = [stage(0, 3), stage(3, 8)]
    shards = MemoryShards(capture_world(stages))
    one = stage(0, 8, lr=0.5)
    restore(one, shards, rank=0)
    assert [g["weight_decay"] for g in one["optimizer"].param_groups] == [0.5, 0.01]
    assert [g["lr"] for g in one["optimizer"].param_groups] == [0.1, 0.1]
    for part in stages:
        for name, parameter in part["model"].named_parameters():
            mine = one["model"].get_parameter(name)
            assert torch.equal(mine, parameter)
            old, new = part["optimizer"].state[parameter], one["optimizer"].state[mine]
            assert torch.equal(old["exp_avg_sq"], new["exp_avg_sq"])
    keys = list(saved(one).indexes()[0].tensors)
    elsewhere = [*keys, *(key.rpartition(".")[0] for key in keys)]
    for first, last in ((0, 1), (1, 2), (2, 8)):
        part = stage(first, last, lr=0.7)
        report = restore(part, saved(one), rank=0, elsewhere=elsewhere)
        assert (report.missing, report.extra) == ((), ())
        for name, parameter in part["model"].named_parameters():
            assert torch.equal(parameter, one["model"].get_parameter(name))
        assert [g["lr"] for g in part["optimizer"].param_groups] == [0.1, 0.1]


@pytest.mark.parametrize("turned", [False, True])
def test_another_kind_of_optimizer_is_refused(tmp_path: Path, turned: bool) -> None:
    model = torch.nn.Linear(3, 2)
    adamw = torch.optim.AdamW(model.parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    saved, live = (sgd, adamw) if turned else (adamw, sgd)
    ckpt.save(tmp_path, {"model": model, "optimizer": saved}, step=1)
    setting = "betas" if turned else "momentum"
    message = f"missing: value optimizer.groups.0.{setting}.*another kind"
    with pytest.raises(MismatchError, match=message):
        ckpt.load(tmp_path, {"model": model, "optimizer": live})
    assert setting in live.param_groups[0]
