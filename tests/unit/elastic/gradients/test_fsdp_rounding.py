"""Exact gradients of FSDP2 modules whose compute dtype differs from their parameter dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from holdfast.ckpt import torch_private
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.mean import Gradients


class Alone:
    """A world of one."""

    def max_(self, tensor: torch.Tensor) -> None: ...

    def sum_(self, tensor: torch.Tensor) -> None: ...

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: None


class Tied(nn.Module):
    """Uses one parameter twice, so that a backward adds two gradients of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.1, 64).reshape(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sin() @ self.weight


class Scaled(nn.Module):
    """Has two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.shift = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.float() + self.shift


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _gradients(model: nn.Module, *, microbatches: int) -> Gradients:
    return Gradients({"model": model}, Alone(), microbatches=microbatches, exact=True, bounds={})


def _mean(mesh: DeviceMesh, order: list[int]) -> torch.Tensor:
    """Return the mean gradient of microbatches that come in ``order``."""
    model = fully_shard(
        Tied(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    gradients = _gradients(model, microbatches=len(order))
    data = torch.linspace(0.1, 3.0, len(order) * 16).reshape(len(order), 2, 8)
    for _ in range(2):  # before the first there is no bound
        gradients.clear()
        gradients.begin_pass()
        for microbatch in order:
            gradients.begin_microbatch(last=microbatch == order[-1])
            gradients.backward(model(data[microbatch]).float().square().mean())
        gradients.end_pass(backwards=len(order))
    found = model.weight.grad
    assert isinstance(found, DTensor)
    return found.to_local().clone()


def test_the_last_microbatch_counts_as_any_other(mesh: DeviceMesh) -> None:
    order = list(range(6))
    first = _mean(mesh, order)
    assert first.abs().max() > 0
    for last in range(5):
        others = [microbatch for microbatch in order if microbatch != last]
        assert torch.equal(_mean(mesh, [*others, last]), first), f"with {last} as the last"


@pytest.mark.skipif(
    not any("override" in field.name for field in fields(MixedPrecisionPolicy)),
    reason="this torch computes with all parameters of a module in one dtype",
)
def test_parameters_of_two_dtypes_in_one_fsdp_module_are_refused(mesh: DeviceMesh) -> None:
    model, wide = Scaled(), {"param_dtype_override_fn": lambda p: p.dtype if p is shift else None}
    shift = model.shift
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **wide)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    gradients = _gradients(model, microbatches=1)
    gradients.begin_pass()
    gradients.begin_microbatch(last=True)
    with pytest.raises(ConfigError, match=r"model\.shift is torch\.float32 .* one dtype"):
        model(torch.ones(2))
