"""Sparse gradients have the mean of dense ones; what cannot be added up is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.ckpt import torch_private
from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError, NotFiniteError
from holdfast.elastic.gradients.mean import Gradients
from holdfast.elastic.groups.by_microbatch import STAND_IN

MICROBATCHES = 3
TEXT = ([0, 2, 2], [4, 0, 1], [2, 2, 0])


class Alone:
    """A world of one."""

    def max_(self, tensor: torch.Tensor) -> None: ...

    def sum_(self, tensor: torch.Tensor) -> None: ...

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: None


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def gradients(model: nn.Module, exact: Exact = "float32") -> Gradients:
    return Gradients({"m": model}, Alone(), microbatches=MICROBATCHES, exact=exact, bounds={})


def one_pass(
    made: Gradients, loss: Callable[[list[int]], torch.Tensor], numbers: tuple[int, ...] = (0, 1, 2)
) -> None:
    made.begin_pass()
    for number, text in zip(numbers, TEXT, strict=True):
        made.begin_microbatch(last=text is TEXT[-1])
        made.backward(loss(text), microbatch=number)
    made.end_pass(backwards=MICROBATCHES)


def table(*, sparse: bool, dtype: torch.dtype = torch.float32) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(6, 3, sparse=sparse, dtype=dtype)


def squared(model: nn.Module) -> Callable[[list[int]], torch.Tensor]:
    return lambda text: model(torch.tensor(text)).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("exact", ["float32", "int64", None])
def test_the_mean_is_that_of_dense_gradients(exact: Exact, dtype: torch.dtype) -> None:
    sparse, dense = table(sparse=True, dtype=dtype), table(sparse=False, dtype=dtype)
    for each in (sparse, dense):
        made = gradients(each, exact)
        for _ in range(2):
            made.clear()
            one_pass(made, squared(each))
    found, wanted = sparse.weight.grad, dense.weight.grad
    assert found is not None
    assert wanted is not None
    assert found.is_sparse
    assert found.is_coalesced()
    assert found.dtype is dtype
    assert found.indices().tolist() == [[0, 1, 2, 4]]
    torch.testing.assert_close(found.to_dense(), wanted)


def test_rows_of_stand_ins_are_left_out() -> None:
    model = table(sparse=True)
    one_pass(gradients(model), squared(model), (0, STAND_IN, 2))
    assert model.weight.grad is not None
    assert model.weight.grad.indices().tolist() == [[0, 2]]


def test_a_parameter_whose_gradients_become_sparse_or_dense_between_passes() -> None:
    model = table(sparse=True)
    made = gradients(model)
    one_pass(made, squared(model))
    made.clear()
    model.sparse = False
    one_pass(made, squared(model))
    assert model.weight.grad is not None
    assert not model.weight.grad.is_sparse
    made.clear()
    model.sparse = True
    with pytest.raises(ConfigError, match=r"shape \[6, 3\] is sparse, and was dense"):
        one_pass(made, squared(model))


@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_that_is_sparse_in_some_microbatches_is_named(first: bool) -> None:
    model = table(sparse=True)

    def loss(text: list[int]) -> torch.Tensor:
        model.sparse = (text is TEXT[0]) == first
        return squared(model)(text)

    with pytest.raises(ConfigError, match=r"gradient of m\.weight is sparse in"):
        one_pass(gradients(model), loss)


def test_an_infinite_row_is_named() -> None:
    model = table(sparse=True)
    with pytest.raises(NotFiniteError, match=r"m\.weight is not finite"):
        one_pass(gradients(model), lambda text: squared(model)(text) * float("inf"))


def test_sharded_layers_are_named(mesh: DeviceMesh) -> None:
    model: Any = nn.Sequential(table(sparse=True))
    fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match=r"m\.0 \(Embedding\) has sparse=True and is sharded"):
        gradients(model).begin_pass()


def test_a_gradient_of_sparse_elements_is_named() -> None:
    model = nn.Linear(3, 3)

    def loss(text: list[int]) -> torch.Tensor:
        index = torch.tensor([[0, 1, 2]])
        return torch.gather(model.weight, 0, index, sparse_grad=True).sum() + len(text)

    with pytest.raises(ConfigError, match=r"m\.weight has 2 sparse dims"):
        one_pass(gradients(model), loss)
