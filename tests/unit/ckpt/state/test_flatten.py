"""A state is flattened into named tensors and plain values, or refused with the path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state.capture import PerRank, flatten
from holdfast.ckpt.state.local_boxes import TensorShard


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)


class Compiled(nn.Module):
    """Wraps as ``torch.compile`` does, without its long import."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


class Counter:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_modules_give_parameters_and_persistent_buffers_by_path() -> None:
    flat = flatten({"model": Tied()})
    assert list(flat.tensors) == [
        "model.embed.weight",
        "model.norm.weight",
        "model.norm.bias",
        "model.norm.running_mean",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
    ]
    assert flat.aliases == {"model.head.weight": "model.embed.weight"}
    assert flat.volatile == {k for k in flat.tensors if "running" in k or "batches" in k}


def test_tensors_shared_between_modules_are_stored_once() -> None:
    shared = nn.Linear(2, 2)
    flat = flatten({"actor": nn.Sequential(shared), "critic": nn.Sequential(shared)})
    assert list(flat.tensors) == ["actor.0.weight", "actor.0.bias"]
    assert flat.aliases == {"critic.0.weight": "actor.0.weight", "critic.0.bias": "actor.0.bias"}


def test_wrappers_leave_no_trace_in_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = list(flatten({"m": plain}).tensors)
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), Compiled(nn.Linear(2, 2)))
    assert list(flatten({"m": wrapped}).tensors) == names
    assert list(flatten({"m": Compiled(DataParallel(wrapped))}).tensors) == names


def test_a_child_that_is_really_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert "m.module.weight" in flatten({"m": Holder()}).tensors


def test_optimizer_state_is_named_by_parameter_wherever_it_stands_in_the_state() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    flat = flatten({"opt": optimizer, "model": model})
    assert "opt.state.model.weight.exp_avg" in flat.tensors
    assert flat.tensors["opt.state.model.bias.step"].shape == ()
    assert flat.values["opt.groups.0.lr"] == 0.5
    assert flat.values["opt.groups.0.betas"] == {"$tuple": [0.9, 0.999]}
    assert flat.values["opt.groups.0.params"] == ["model.weight", "model.bias"]
    assert not flat.volatile


def test_an_optimizer_without_its_module_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 3).parameters())
    with pytest.raises(StateError, match=r"opt: the parameter at group 0, position 0 .*\(3, 2\)"):
        flatten({"opt": optimizer})


def test_stateful_objects_become_one_value_with_tensors_by_name() -> None:
    state = {"cursor": 3, 7: (1, 2), "ema": torch.ones(2), "rng": PerRank([1])}
    flat = flatten({"sampler": Counter(state)})
    assert list(flat.tensors) == ["sampler.ema"]
    assert flat.volatile == {"sampler.ema"}
    assert flat.rank_values == {"sampler.rng@0": [1]}
    assert flat.values["sampler"] == {
        "$map": [
            ["cursor", 3],
            [7, {"$tuple": [1, 2]}],
            ["ema", {"$tensor": "sampler.ema"}],
            ["rng", {"$rank": "sampler.rng"}],
        ]
    }


def test_a_mapping_with_live_objects_is_a_name_space_and_a_plain_one_a_value() -> None:
    flat = flatten(
        {
            "nets": {"a": nn.Linear(1, 1, bias=False), "k": 2, "list": [torch.ones(1), 5]},
            "progress": {"epoch": 1},
            "rng": PerRank({"draws": 3, "state": torch.get_rng_state()}),
        }
    )
    assert list(flat.tensors) == ["nets.a.weight", "nets.list.0", "rng@0.state"]
    assert flat.values == {"nets.k": 2, "nets.list.1": 5, "progress": {"epoch": 1}}
    assert flat.rank_values == {"rng@0": {"state": {"$tensor": "rng@0.state"}, "draws": 3}}
    assert flat.own == {"rng@0.state"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [1, object()]}}, r"a\.b\.1: cannot capture"),
        ({"a": np.array(["x"])}, r"a: an array of dtype <U1"),
        ({"a": np.ones(2)[::-1]}, r"a: a backwards array"),
        ({"a": np.ma.array([1])}, r"a: MaskedArray is more than an array"),
        ({"a": np.broadcast_to(np.ones(1), 3)}, r"a: a read-only array .* track a copy"),
        ({"a": {"f": torch.ones(1), 3: 1}}, r"a: key 3 is not a name"),
        ({"a": torch.ones(2, 2).to_sparse()}, r"a: layout"),
        ({"a": nn.Linear(2, 2, device="meta")}, r"a\.weight: not materialised"),
        ({"a": nn.LazyLinear(2)}, r"a\.weight: not materialised"),
        ({"a": Counter({"x": {"y": {1, object()}}})}, r"a\.x\.y\.\d: .*object"),
        ({"a": PerRank(TensorShard(torch.ones(1), shape=(2,), offset=(0,)))}, r"a@0: a part of"),
        ({"a": PerRank(object())}, r"a@0: cannot capture"),
        ({"a": np.void(b"x")}, r"a: a NumPy value of dtype"),
        ({"s": Counter({"a": PerRank(1)}), "s.a": PerRank(2)}, r"s\.a: two entries"),
        ({"a.b": 1, "a": {"b": 2, "t": torch.ones(1)}}, r"a\.b: two entries"),
        ({"a": torch.empty(2, dtype=torch.bits8)}, r"a: dtype"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_its_path(state: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        flatten(state)


def test_a_value_that_holds_itself_is_refused() -> None:
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(StateError, match="'ring' holds itself"):
        flatten({"ring": ring})
