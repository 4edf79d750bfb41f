"""Clipping counts every element of every gradient, of whatever kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.elastic.gradients.clipping import clip_grad_norm_


class Alone:
    """A world of one."""

    def counts(self, gradient: torch.Tensor) -> bool:
        return True

    def over_stages(self, count: int) -> int:
        return count

    def max_(self, tensor: torch.Tensor) -> None: ...

    def sum_(self, tensor: torch.Tensor) -> None: ...


def clipped(parameters: Any, max_norm: float) -> float:
    world: Any = Alone()
    return clip_grad_norm_(parameters, max_norm, world=world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_the_norm_is_torchs(dtype: torch.dtype) -> None:
    one, other = (nn.Parameter(torch.zeros(3, 2, dtype=dtype)) for _ in range(2))
    one.grad = torch.randn(3, 2, generator=torch.Generator().manual_seed(1), dtype=dtype)
    whole = torch.linalg.vector_norm(one.grad).item()
    assert clipped([one, other], 0.5) == pytest.approx(whole, rel=1e-2)
    assert torch.linalg.vector_norm(one.grad).item() == pytest.approx(0.5, rel=1e-2)


def test_one_parameter_by_itself_is_clipped_too() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.full((2, 2), 4.0)
    assert clipped(weight, 1.0) == 8.0
    assert weight.grad.tolist() == [[0.5, 0.5]] * 2
