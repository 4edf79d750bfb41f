"""Optimizers whose update needs whole tensors make it on whole tensors, others are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.ckpt import torch_private
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients import whole_tensors
from holdfast.elastic.gradients.whole_tensors import declare_optimizer, whole_updates


class Larger(torch.optim.SGD):
    """Has the step of its parent."""


class Normed(torch.optim.SGD):
    """Divides by the norm of each gradient, and counts its steps in the group, not in the state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    with torch.no_grad():
                        p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Around(torch.optim.Optimizer):
    """Steps another optimizer, as Accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget declarations after the test."""
    monkeypatch.setattr(whole_tensors, "_UPDATES", dict(whole_tensors._UPDATES))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def model(mesh: DeviceMesh | None) -> nn.Module:
    """A model whose first layer is sharded if there is a mesh."""
    torch.manual_seed(0)
    built = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False))
    if mesh is not None:
        fully_shard(built[0], mesh=mesh)
    return built


def step(built: nn.Module, optimizer: torch.optim.Optimizer, times: int = 3) -> list[torch.Tensor]:
    for _ in range(times):
        for at, parameter in enumerate(built.parameters()):
            parameter.grad = torch.sin(parameter.detach() * (at + 2))
        with whole_updates([optimizer], exact="float32"):
            optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in built.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, Normed])
def test_sharded_and_plain_parameters_get_the_same_updates(mesh: DeviceMesh, kind: Any) -> None:
    declare_optimizer(Normed, "whole")
    plain, sharded = model(None), model(mesh)
    one, other = kind(plain.parameters(), lr=0.1), kind(sharded.parameters(), lr=0.1)
    calls: list[int] = []
    other.register_step_post_hook(lambda *_: calls.append(1))
    assert all(map(torch.equal, step(plain, one), step(sharded, other)))
    assert calls == [1, 1, 1]
    assert one.param_groups[0].get("steps") == other.param_groups[0].get("steps")
    assert len(other.param_groups[0]["params"]) == 2
    parameters = list(sharded.parameters())
    assert set(other.state) <= set(parameters)
    for mine, its in zip(plain.parameters(), parameters, strict=True):
        assert one.state[mine].keys() == other.state[its].keys()
        for key, value in one.state[mine].items():
            found = other.state[its][key]
            assert isinstance(found, DTensor) == (isinstance(its, DTensor) and value.ndim > 0)
            assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, value)


def test_state_is_kept_in_the_same_memory(mesh: DeviceMesh) -> None:
    sharded = model(mesh)
    optimizer = torch.optim.Muon(sharded.parameters())
    step(sharded, optimizer, 1)
    first = next(iter(sharded.parameters()))
    before = optimizer.state[first]["momentum_buffer"]
    step(sharded, optimizer, 1)
    assert optimizer.state[first]["momentum_buffer"] is before


@pytest.mark.parametrize("kind", [Larger, torch.optim.AdamW])
def test_elementwise_optimizers_step_shards(mesh: DeviceMesh, kind: Any) -> None:
    plain, sharded = model(None), model(mesh)
    found = step(sharded, kind(sharded.parameters(), lr=0.1))
    assert all(map(torch.equal, step(plain, kind(plain.parameters(), lr=0.1)), found))


def test_an_unknown_optimizer_of_shards_is_refused_until_it_is_declared(mesh: DeviceMesh) -> None:
    sharded = model(mesh)
    optimizer = Normed(sharded.parameters(), lr=0.1)
    for each in (optimizer, Around(optimizer)):
        with pytest.raises(ConfigError, match=r'declare_optimizer\(Normed, "elementwise"\)'):
            step(sharded, each)
    with whole_updates([optimizer], exact=None):
        optimizer.step()
    plain = model(None)
    step(plain, Normed(plain.parameters(), lr=0.1))
    declare_optimizer(Normed, "elementwise")
    step(sharded, optimizer)


def test_a_wrapper_steps_whole_tensors_too(mesh: DeviceMesh) -> None:
    plain, sharded = model(None), model(mesh)
    optimizer = Around(torch.optim.Muon(sharded.parameters()))
    found = step(sharded, optimizer)
    assert all(map(torch.equal, step(plain, torch.optim.Muon(plain.parameters())), found))


@pytest.mark.parametrize(
    ("kind", "update"), [(Normed, "blockwise"), (nn.Linear, "whole"), (3, "whole")]
)
def test_declarations_that_say_nothing_are_refused(kind: Any, update: Any) -> None:
    with pytest.raises(ConfigError, match="declare_optimizer"):
        declare_optimizer(kind, update)
