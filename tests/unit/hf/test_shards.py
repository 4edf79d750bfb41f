"""A module that ``fully_shard`` cuts in place: whole for a while, whole again, and cut anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from adapter_packages import needs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from holdfast.adapters.hf.shards import ShardedModel

pytestmark = needs("transformers", "accelerate")


class Net(nn.Module):
    """Two tied layers, one that is not trained, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return self.last(torch.tanh(self.base(self.first(x))))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        x = torch.arange(12.0).view(3, 4)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def made() -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def cut(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> ShardedModel:
    return ShardedModel(model, optimizer, lambda module: fully_shard(module, mesh=mesh))


def test_training_goes_on_over_cuts_as_if_there_were_none(mesh: DeviceMesh) -> None:
    plain, of_plain = made()
    trained(plain, of_plain, 4)
    model, optimizer = made()
    first = model.first.weight
    for generation in range(2):
        shards = cut(model, optimizer, mesh)
        assert isinstance(model, FSDPModule)
        assert isinstance(model.base.weight, DTensor)
        shards.drop()
        trained(model, optimizer, 2)
        shards.collect()
        shards.release(trained=True)
        assert type(model) is Net, generation
    assert model.last.weight is model.first.weight is first
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    moments, wanted = optimizer.state_dict()["state"], of_plain.state_dict()["state"]
    torch.testing.assert_close(moments, wanted, rtol=0, atol=0)


def test_model_and_optimizer_are_whole_while_they_are_lifted(mesh: DeviceMesh) -> None:
    model, optimizer = made()
    shards = cut(model, optimizer, mesh)
    trained(model, optimizer, 2)
    plain, of_plain = made()
    trained(plain, of_plain, 2)
    first = shards.pairs[0][0].detach().clone()
    with shards.lifted(here=True):
        assert type(model) is Net
        assert shards.is_lifted
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
        moments, wanted = optimizer.state_dict(), of_plain.state_dict()
        torch.testing.assert_close(moments["state"], wanted["state"], rtol=0, atol=0)
        assert moments["param_groups"] == wanted["param_groups"]
    assert torch.equal(shards.pairs[0][0], first), "the first weights are kept until they go"
    trained(model, optimizer, 1)
    trained(plain, of_plain, 1)
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[operator]
    torch.testing.assert_close(whole, dict(plain.named_parameters()), rtol=0, atol=0)


def test_nothing_of_a_cut_is_left_on_the_modules(mesh: DeviceMesh) -> None:
    model, optimizer = made()
    calls: list[int] = []
    model.base.register_forward_hook(lambda *_: calls.append(1))
    before = [sorted(vars(module)) for module in model.modules()]
    shards = cut(model, optimizer, mesh)
    trained(model, optimizer, 1)
    model.first.register_forward_hook(lambda *_: calls.append(2))
    shards.release(trained=False)
    assert [sorted(vars(module)) for module in model.modules()] == before
    calls.clear()
    model(torch.ones(1, 4))
    assert calls == [2, 1], "hooks of the script stay"
    assert optimizer.param_groups[0]["params"] == [model.first.weight]


def test_frozen_weights_stay_whole_if_asked(mesh: DeviceMesh) -> None:
    model, optimizer = made()
    base = model.base.weight.detach().clone()
    shards = cut(model, optimizer, mesh)
    shards.drop(keep_frozen=True)
    shards.release(trained=False)
    assert torch.equal(model.base.weight, base)
    assert torch.equal(model.first.weight, torch.zeros(4, 4)), "to be restored"
