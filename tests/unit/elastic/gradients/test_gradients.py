"""Exact gradients refuse by name every gradient that they cannot keep exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.gradients.mean import Gradients
from holdfast.elastic.gradients.wrapped import exact_method


class Alone:
    """A world of one."""

    def max_(self, tensor: torch.Tensor) -> None: ...

    def sum_(self, tensor: torch.Tensor) -> None: ...

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: None


def _gradients(
    model: nn.Module, bounds: dict[str, int] | None = None, *, exact: Exact = "float32"
) -> Gradients:
    return Gradients(
        {"model": model},
        Alone(),
        microbatches=2,
        exact=exact,
        bounds={} if bounds is None else bounds,
    )


def _pass(gradients: Gradients, model: nn.Module, *scales: float) -> None:
    gradients.begin_pass()
    for last, scale in zip((False, True), scales or (1.0, 1.0), strict=True):
        gradients.begin_microbatch(last=last)
        gradients.backward(model(torch.ones(1, 2)).sum() * scale)
    gradients.end_pass(backwards=2)


@pytest.mark.parametrize("exact", ["float32", "int64"])
def test_gradients_above_their_bound_are_in_the_mean_and_raise_the_bound(exact: Exact) -> None:
    model, bounds = nn.Linear(2, 1), dict[str, int]()
    gradients = _gradients(model, bounds, exact=exact)
    headroom = 2 if exact == "float32" else 8
    for scales, mean, bound in (
        ((1.0, 1.0), 1.0, 0 + headroom),  # before the first there is no bound
        ((1.0, 1.0), 1.0, 0 + headroom),
        ((1.0, 4096.0), 2048.5, 12 + headroom),  # one of the two exceeds it
        ((2.0**40, 3.0), 2.0**39 + 1.5, 40 + headroom),
    ):
        _pass(gradients, model, *scales)
        assert set(bounds.values()) == {bound}
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[pytest.approx(mean, rel=2**-20)] * 2]
        gradients.clear()


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_a_sum_begins_anew_in_each_pass_though_its_memory_stays(microbatches: int) -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
    gradients = Gradients(
        {"model": model}, Alone(), microbatches=microbatches, exact="int64", bounds={}
    )
    for used in ([0, 1, 2], [0, 2], [1], [0, 1, 2]):
        gradients.begin_pass()
        for number in range(microbatches):
            gradients.begin_microbatch(last=number == microbatches - 1)
            outputs = [model[at](torch.ones(1, 2)).sum() * (at + number) for at in used]
            gradients.backward(torch.stack(outputs).sum())
        gradients.end_pass(backwards=microbatches)
        gradients.end_step()
        found = [None if each.weight.grad is None else each.weight.grad[0, 0] for each in model]
        mean = (microbatches - 1) / 2
        assert found == [at + mean if at in used else None for at in range(3)]
        gradients.clear()


@pytest.mark.parametrize("said", [None, True, "float32", "int64"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_true_is_fixed_point_unless_fsdp2_shards_a_part_of_the_model(
    monkeypatch: pytest.MonkeyPatch, said: Exact, sharded: bool, elsewhere: bool
) -> None:
    if sharded:
        monkeypatch.setattr("holdfast.elastic.gradients.wrapped.FSDPModule", nn.Tanh)
    state = [nn.Sequential(nn.Linear(2, 1), nn.Tanh()), torch.ones(1), {"x": 1}]
    found = exact_method(said, state, unite=lambda names: names + ["sharded"] * elsewhere)
    meant = "float32" if sharded or elsewhere else "int64"
    assert found == (meant if said is True else said)


def test_bounds_fall_by_half_in_a_step_however_many_passes_it_has() -> None:
    model, bounds = nn.Linear(2, 1), {"model.weight": 20, "model.bias": 20}
    gradients = _gradients(model, bounds)
    for _ in range(3):
        _pass(gradients, model)
    assert set(bounds.values()) == {20}
    gradients.end_step()
    assert set(bounds.values()) == {19}
    gradients.begin_pass()
    gradients.end_pass(backwards=0)
    gradients.end_step()
    assert set(bounds.values()) == {19}, "there was no gradient"


def test_backwards_of_the_users_own_are_not_rounded() -> None:
    model = nn.Linear(2, 1)
    gradients = _gradients(
        model, dict.fromkeys(["model.weight", "model.bias"], 24)
    )  # the grid is 2
    gradients.begin_pass()
    for last in (False, True):
        gradients.begin_microbatch(last=last)
        loss = (model(torch.full((1, 2), 0.7)).sum() * 3.0).square()
        inner = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        with torch.no_grad():
            plain = 2 * 9.0 * 0.7 * model(torch.full((1, 2), 0.7)).sum()
        assert inner[0].tolist() == [[pytest.approx(plain.item(), rel=1e-5)] * 2]
        gradients.backward(sum(each.square().sum() for each in inner))
    gradients.end_pass(backwards=2)
    assert model.weight.grad is not None
    assert not (model.weight.grad % 1).any()


def test_a_parameter_without_a_gradient_stays_without() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    gradients = _gradients(model, dict.fromkeys([f"model.used.{n}" for n in ("weight", "bias")], 5))
    _pass(gradients, model["used"])
    assert model["unused"].weight.grad is None


@pytest.mark.parametrize("exact", ["float32", "int64", None])
def test_parameters_that_are_frozen_and_thawed_in_turn_train_in_turn(exact: Exact) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    gradients = _gradients(model, exact=exact)
    for turn in range(6):
        on, off = model[turn % 2], model[1 - turn % 2]
        on.requires_grad_(True)
        off.requires_grad_(False)
        _pass(gradients, model)
        assert on.weight.grad is not None
        assert on.weight.grad.any()
        assert off.weight.grad is None
        gradients.clear()


class Twice(Alone):
    """Doubles its sums, as two equal ranks would."""

    def sum_(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: self.sum_(tensor)


@pytest.mark.parametrize("exact", ["float32", "int64", None])
@pytest.mark.parametrize("again", [False, True])
def test_parameters_that_are_thawed_inside_the_pass_are_summed(exact: Exact, again: bool) -> None:
    model = nn.Linear(2, 1)
    gradients = Gradients({"model": model}, Twice(), microbatches=4, exact=exact, bounds={})
    for _ in range(3):
        model.bias.requires_grad_(False)
        gradients.begin_pass()
        for last in (False, True):
            gradients.begin_microbatch(last=last)
            model.bias.requires_grad_(True)
            gradients.backward(model(torch.ones(1, 2)).sum())
            model.bias.requires_grad_(not again)
        gradients.end_pass(backwards=2)
        assert model.bias.grad is not None
        assert model.bias.grad.tolist() == [1.0]
        gradients.clear()


def test_a_frozen_parameter_with_a_gradient_of_zeros_is_no_concern() -> None:
    model = nn.Linear(2, 1)
    model.bias.grad = torch.zeros(1)
    model.bias.requires_grad_(False)
    _pass(_gradients(model), model)


@pytest.mark.parametrize("exact", ["float32", "int64", None])
def test_gradients_of_a_dtype_of_their_own_keep_it(exact: Exact) -> None:
    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    model.bias.requires_grad_(False)
    model.weight.grad_dtype = torch.float32
    gradients = _gradients(model, exact=exact)
    gradients.begin_pass()
    for value in (1.0, 2.0**-7):
        gradients.begin_microbatch(last=value < 1)
        gradients.backward(model(torch.full((1, 2), value, dtype=torch.bfloat16)).sum())
    gradients.end_pass(backwards=2)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
    gradients.spoil()
    assert model.weight.grad.isnan().all()


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named(scale: float) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(JobFailedError, match=r"model\.weight is not finite"):
        _pass(_gradients(model), model, 1.0, scale)


def test_dtypes_that_cannot_be_rounded_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.weight is torch\.complex64"):
        _gradients(nn.Linear(2, 1, dtype=torch.complex64))


@pytest.mark.parametrize("exact", ["float32", "int64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floating_point_parameters_get_means_of_their_own_dtype(
    exact: Exact, dtype: torch.dtype
) -> None:
    model = nn.Linear(2, 1, dtype=dtype)
    gradients = _gradients(model, exact=exact)
    gradients.begin_pass()
    for value in (1.0, 2.0**-7):
        gradients.begin_microbatch(last=value < 1)
        gradients.backward(model(torch.full((1, 2), value, dtype=dtype)).sum())
    gradients.end_pass(backwards=2)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is dtype
    assert model.weight.grad.tolist() == [[0.50390625, 0.50390625]]


def test_a_parameter_that_thaws_or_is_replaced_is_rounded_too() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    bounds = dict.fromkeys(["model.weight", "model.bias"], 24)  # the grid is 2
    gradients = _gradients(model, bounds)
    _pass(gradients, model, 3.0, 3.0)
    gradients.clear()
    model.bias.requires_grad_(True)
    model.weight = nn.Parameter(torch.ones(1, 2))
    bounds |= dict.fromkeys(bounds, 24)
    _pass(gradients, model, 3.0, 3.0)
    assert model.bias.grad is not None
    assert model.weight.grad is not None
    assert model.bias.grad.tolist() == [4.0]
    assert model.weight.grad.tolist() == [[4.0, 4.0]]


@pytest.mark.parametrize("option", ["static_graph", "mixed_precision"])
def test_options_of_ddp_that_reduce_behind_our_back_are_refused(option: str) -> None:
    wrapped: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.static_graph, wrapped.mixed_precision = False, None
    setattr(wrapped, option, True)
    with pytest.raises(ConfigError, match=f"DistributedDataParallel with {option}"):
        _gradients(wrapped)


def test_fsdp1_is_refused() -> None:
    wrapped: Any = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(ConfigError, match="use fully_shard"):
        _gradients(wrapped)


def test_ranks_that_did_different_things_are_told() -> None:
    class Other(Alone):
        def max_(self, tensor: torch.Tensor) -> None:
            tensor[-2:] = torch.tensor([9.0, -7.0], dtype=torch.float64)

    model = nn.Linear(2, 1)
    gradients = Gradients({"model": model}, Other(), microbatches=2, exact=None, bounds={})
    with pytest.raises(ConfigError, match="different things"):
        _pass(gradients, model)
