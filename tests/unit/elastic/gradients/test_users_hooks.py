"""The script's hooks on parameters run before the run's own, and leave sums alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.mean import Gradients


class Alone:
    """A world of one."""

    def max_(self, tensor: torch.Tensor) -> None: ...

    def sum_(self, tensor: torch.Tensor) -> None: ...

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: None


Hooking = Callable[[nn.Parameter], object]

EVERY: list[Exact] = ["float32", "int64", None]
VALUES = (0.7, 5.0, 0.3)


def trained(exact: Exact, *, before: Hooking | None = None, after: Hooking | None = None) -> float:
    """Return the mean gradient of a weight, hooked before `track` or in the pass."""
    model = nn.Linear(1, 1, bias=False)
    if before is not None:
        before(model.weight)
    gradients = Gradients(
        {"model": model},
        Alone(),
        microbatches=len(VALUES),
        exact=exact,
        bounds={"model.weight": 24},  # the grid is 2 or 4
    )
    gradients.begin_pass()
    for at, value in enumerate(VALUES):
        gradients.begin_microbatch(last=at == len(VALUES) - 1)
        loss = model(torch.full((1, 1), value)).sum()
        if after is not None and at == 0:
            after(model.weight)
        gradients.backward(loss)
    gradients.end_pass(backwards=len(VALUES))
    assert model.weight.grad is not None
    gradients.close()
    return model.weight.grad.item()


def enlarge(weight: nn.Parameter) -> None:
    weight.register_hook(lambda gradient: gradient * 3.3)


@pytest.mark.parametrize("exact", EVERY)
def test_a_hook_on_the_gradient_runs_before_it_is_rounded(exact: Exact) -> None:
    assert trained(exact, before=enlarge) == trained(exact, after=enlarge)


@pytest.mark.parametrize("exact", EVERY)
def test_hooks_that_change_a_sum_are_refused(exact: Exact) -> None:
    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 0.5

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for change in (halve, drop):

        def hook(weight: nn.Parameter, change: Callable[..., None] = change) -> None:
            weight.register_post_accumulate_grad_hook(change)  # type: ignore[no-untyped-call]

        for when in ("before", "after"):
            with pytest.raises(ConfigError, match=r"a hook .* changed the gradient of model\.wei"):
                trained(exact, **{when: hook})


@pytest.mark.parametrize("exact", EVERY)
def test_hooks_that_read_a_sum_read_it_and_can_be_removed(exact: Exact) -> None:
    seen: list[bool] = []
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def hook(weight: nn.Parameter) -> None:
        handles.append(
            weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda parameter: seen.append(parameter.grad is not None)
            )
        )

    plain = trained(exact)
    assert trained(exact, before=hook) == trained(exact, after=hook) == plain
    assert seen == [True] * 2 * len(VALUES)
    for handle in handles:
        handle.remove()
