"""Buckets start in one order on every rank, during the last backward pass if possible."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients import buckets as buckets_module
from holdfast.elastic.gradients.buckets import Buckets


class Sums:
    """Doubles its input, as two equal ranks would, when the caller waits for it."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def max_(self, tensor: torch.Tensor) -> None: ...

    def sum_(self, tensor: torch.Tensor) -> None: ...

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        self.started.append(tensor.numel())

        def wait() -> None:
            tensor.mul_(2)

        return wait


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[nn.Parameter]:
    """Three of different sizes, each a bucket of its own."""
    monkeypatch.setattr(buckets_module, "BUCKET_BYTES", 1)
    return [nn.Parameter(torch.ones(size)) for size in (1, 2, 3)]


def _backward(weight: nn.Parameter) -> None:
    weight.sum().backward()  # type: ignore[no-untyped-call]


def _gradients(weights: list[nn.Parameter]) -> list[float | None]:
    return [None if w.grad is None else w.grad.unique().item() for w in weights]


def test_the_last_backward_starts_what_it_completes_in_order_and_its_end_the_rest(
    weights: list[nn.Parameter],
) -> None:
    sums = Sums()
    buckets = Buckets(lambda _: sums, early=True)
    for _ in range(2):  # the second pass as the first
        sums.started.clear()
        buckets.begin_pass(weights)
        for last in (False, True):
            buckets.begin_microbatch(last=last)
            for weight in (weights[1], weights[2]):
                _backward(weight)
            assert sums.started == ([3, 2] if last else [])
            buckets.end_backward()
        assert sums.started == [3, 2, 1]
        buckets.finish(set(map(id, weights)))
        assert _gradients(weights) == [0.0, 4.0, 4.0]
        for weight in weights:
            weight.grad = None
    buckets.close()
    _backward(weights[0])


def test_what_no_rank_has_stays_without_and_nothing_is_early_where_it_must_not_be(
    weights: list[nn.Parameter],
) -> None:
    sums = Sums()
    buckets = Buckets(lambda _: sums, early=False)
    buckets.begin_pass(weights)
    buckets.begin_microbatch(last=True)
    _backward(weights[1])
    assert sums.started == []
    buckets.finish({id(weights[0]), id(weights[1])})
    assert _gradients(weights) == [0.0, 2.0, None]


def test_a_gradient_that_comes_after_its_sum_was_started_is_told(
    weights: list[nn.Parameter],
) -> None:
    buckets = Buckets(lambda _: Sums(), early=True)
    buckets.begin_pass(weights)
    buckets.begin_microbatch(last=True)
    _backward(weights[2])
    with pytest.raises(ConfigError, match="two gradients in the last backward"):
        _backward(weights[2])


def test_small_gradients_of_one_dtype_share_a_bucket() -> None:
    sums = Sums()
    buckets = Buckets(lambda _: sums, early=False)
    wide = nn.Parameter(torch.ones(7, dtype=torch.float64))
    some = [nn.Parameter(torch.ones(size)) for size in (1, 2, 3)]
    buckets.begin_pass([some[0], wide, *some[1:]])
    buckets.finish(set())
    assert sums.started == [5, 7, 1]
