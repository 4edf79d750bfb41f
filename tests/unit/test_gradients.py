"""Exact gradients refuse what they cannot keep exact, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic.errors import ConfigError, JobFailed
from elastic.gradients import Gradients


class Alone:
    """A world of one."""

    def max_(self, tensor: torch.Tensor) -> None: ...

    def sum_(self, tensor: torch.Tensor) -> None: ...


def _gradients(model: nn.Module, bounds: dict[str, int] | None = None) -> Gradients:
    return Gradients(
        {"model": model},
        Alone(),
        microbatches=2,
        exact=True,
        bounds={} if bounds is None else bounds,
    )


def _pass(gradients: Gradients, model: nn.Module, scale: float = 1.0) -> bool:
    gradients.begin_pass()
    for last in (False, True):
        gradients.begin_microbatch(last=last)
        (model(torch.ones(1, 2)).sum() * scale).backward()
    return gradients.end_pass(backwards=2, agree=7)


def test_the_first_pass_measures_and_the_second_keeps_to_the_grid() -> None:
    model, bounds = nn.Linear(2, 1), dict[str, int]()
    gradients = _gradients(model, bounds)
    assert not _pass(gradients, model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert _pass(gradients, model)
    assert bounds == {"model.weight": 2, "model.bias": 2}
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    gradients.clear()
    assert not _pass(gradients, model, scale=5.0)


def test_a_parameter_without_a_gradient_stays_without() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    gradients = _gradients(model, dict.fromkeys([f"model.used.{n}" for n in ("weight", "bias")], 5))
    assert _pass(gradients, model["used"])
    assert model["unused"].weight.grad is None


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named(scale: float) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(JobFailed, match=r"model\.weight is not finite"):
        _pass(_gradients(model), model, scale=scale)


def test_other_dtypes_than_float32_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.weight is torch\.bfloat16"):
        _gradients(nn.Linear(2, 1, dtype=torch.bfloat16))


def test_wrappers_that_average_are_refused() -> None:
    wrapped: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        _gradients(wrapped)


def test_ranks_that_did_different_things_are_told() -> None:
    class Other(Alone):
        def max_(self, tensor: torch.Tensor) -> None:
            tensor[-2:] = torch.tensor([9.0, -7.0], dtype=torch.float64)

    model = nn.Linear(2, 1)
    gradients = Gradients({"model": model}, Other(), microbatches=2, exact=False, bounds={})
    with pytest.raises(ConfigError, match="different things"):
        _pass(gradients, model)
