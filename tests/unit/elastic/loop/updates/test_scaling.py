"""All ranks agree on whether a scaled update is skipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from holdfast.elastic.loop.updates.scaling import agreed_infinity


@pytest.mark.parametrize(("own", "others"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_an_infinity_of_any_rank_is_everyones(
    own: float, others: float, has_gradient: bool
) -> None:
    weight, idle = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    scaler = GradScaler("cpu", init_scale=4.0)
    optimizers = [torch.optim.SGD([each], 1.0) for each in (weight, idle)]
    loss = scaler.scale(weight.sum())
    if has_gradient:
        loss.backward()  # type: ignore[no-untyped-call]
        if own and weight.grad is not None:
            weight.grad.fill_(torch.inf)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)

    def agree(tensor: torch.Tensor) -> None:
        tensor.clamp_(min=others)

    skips = bool(others or (own and has_gradient))
    assert agreed_infinity(scaler, agree) is skips
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0 if skips else 4.0)
    assert bool(weight.any()) is (has_gradient and not skips)
