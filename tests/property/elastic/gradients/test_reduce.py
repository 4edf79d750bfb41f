"""Pre-rounded sums and norms are equal, bit for bit, in any order and any grouping."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.gradients.exact import (
    FLOAT32,
    FLOAT64,
    INT64,
    MIN_EXPONENT,
    Method,
    exact_norm,
    exponent_above,
    next_bound,
    round_to_grid,
)

floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)


@given(value=st.floats(min_value=1e-25, max_value=1e25))
def test_the_exponent_is_the_smallest_that_holds(value: float) -> None:
    exponent = exponent_above(value)
    assert 2.0**exponent >= value > 2.0 ** (exponent - 1)


@given(
    method=st.sampled_from([FLOAT32, FLOAT64, INT64]),
    values=st.lists(floats, min_size=1, max_size=24),
    order=st.randoms(use_true_random=False),
    cuts=st.integers(1, 5),
)
def test_a_sum_on_the_grid_is_exact_in_any_grouping(
    method: Method, values: list[float], order: Any, cuts: int
) -> None:
    terms = torch.tensor(values)
    bound = exponent_above(terms.abs().max().item())
    grid = method.grid(bound, terms=len(values))
    rounded = method.added(None, terms, grid)
    step = 2.0**grid if method is INT64 else 1.0
    exact = sum(Fraction(value) for value in rounded.tolist())
    shuffled = rounded.tolist()
    order.shuffle(shuffled)
    total = torch.zeros((), dtype=method.total)
    for start in range(cuts):  # groups, each summed alone, then together
        group = torch.zeros((), dtype=method.total)
        for term in shuffled[start::cuts]:
            group = group + torch.tensor(term, dtype=method.total)
        total = total + group
    assert Fraction(total.item()) == exact
    mean = method.mean(total, grid, terms=len(values)).item()
    assert math.isclose(mean, float(exact / len(values)) * step, rel_tol=1e-6)
    finest = 2.0 ** (method.finest - 1)  # half a step of the finest grid there is
    error = (rounded.double() * step - terms.double()).abs().max().item()
    assert error <= max(2.0**bound * len(values) * 2.0**-method.digits, finest)


@pytest.mark.parametrize("method", [FLOAT32, INT64])
def test_large_tensors_of_any_strides_are_rounded_run_by_run(method: Method) -> None:
    values = torch.randn(300, 700, generator=torch.Generator().manual_seed(0)).t()
    wanted = (values.double() * 2.0**10).round_()
    if method is FLOAT32:
        wanted *= 2.0**-10
    once = method.added(None, values, -10)
    assert torch.equal(once.double(), wanted)
    assert torch.equal(method.added(once, values, -10).double(), 2 * wanted)


def test_values_below_the_finest_grid_do_not_disturb() -> None:
    tiny = torch.tensor([1e-38, -1e-44, 0.0])
    grid = FLOAT32.grid(MIN_EXPONENT, terms=8)
    assert round_to_grid(tiny, grid).tolist() == [0.0, 0.0, 0.0]


def test_a_bound_has_headroom_and_shrinks_slowly() -> None:
    assert next_bound(MIN_EXPONENT, 1.0, headroom_bits=2) == 2
    assert next_bound(10, 1.0, headroom_bits=2) == 9
    assert next_bound(2, 1.0, headroom_bits=2) == 2
    assert next_bound(MIN_EXPONENT, 0.0, headroom_bits=2) == MIN_EXPONENT


def _norm(parts: list[torch.Tensor], *, world: int) -> float:
    """Compute the norm as ``world`` ranks would: each sees a part, all reduce."""
    shares = [parts[rank::world] for rank in range(world)]
    terms = sum(part.numel() for part in parts)
    peak = torch.tensor([max((part.double().square().max() for part in parts), default=0.0)])
    sums: list[torch.Tensor] = []

    def reduce_max(tensor: torch.Tensor) -> None:
        tensor.copy_(peak.double())

    for share in shares:
        exact_norm(share, terms=terms, reduce_max=reduce_max, reduce_sum=sums.append)
    return math.sqrt(sum(total.item() for total in sums))


@settings(max_examples=examples(60))
@given(
    values=st.lists(floats, min_size=1, max_size=64),
    seed=st.integers(0, 1000),
    cuts=st.integers(1, 8),
    world=st.integers(1, 4),
)
def test_the_norm_is_the_same_for_any_split(
    values: list[float], seed: int, cuts: int, world: int
) -> None:
    whole = torch.tensor(values)
    alone = _norm([whole], world=1)
    mixed = whole[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))]
    parts = [part for part in mixed.tensor_split(cuts) if part.numel()]
    assert _norm(parts, world=world) == alone
    assert math.isclose(alone, whole.double().norm().item(), rel_tol=1e-9, abs_tol=1e-60)


def test_a_norm_that_is_not_finite_is_not_a_number() -> None:
    parts = [torch.tensor([1.0, math.inf])]
    norm = exact_norm(parts, terms=2, reduce_max=lambda t: None, reduce_sum=lambda t: None)
    assert math.isnan(norm)
