"""Pre-rounded sums and norms are equal, bit for bit, in any order and any grouping."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.reduce import (
    HEADROOM_BITS,
    MIN_EXPONENT,
    exact_norm,
    exponent_above,
    grid_exponent,
    next_bound,
    round_to_grid,
)

floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)


@given(value=st.floats(min_value=1e-25, max_value=1e25))
def test_the_exponent_is_the_smallest_that_holds(value: float) -> None:
    exponent = exponent_above(value)
    assert 2.0**exponent >= value > 2.0 ** (exponent - 1)


@given(
    values=st.lists(floats, min_size=1, max_size=24),
    order=st.randoms(use_true_random=False),
    cuts=st.integers(1, 5),
)
def test_a_sum_on_the_grid_is_exact_in_any_grouping(
    values: list[float], order: Any, cuts: int
) -> None:
    terms = torch.tensor(values)
    bound = exponent_above(terms.abs().max().item())
    rounded = round_to_grid(terms, grid_exponent(bound, terms=len(values)))
    exact = math.fsum(rounded.tolist())
    shuffled = rounded.tolist()
    order.shuffle(shuffled)
    total = torch.zeros(())
    for start in range(cuts):  # groups, each summed alone, then together
        group = torch.zeros(())
        for term in shuffled[start::cuts]:
            group = group + torch.tensor(term)
        total = total + group
    assert total.item() == exact
    finest = 2.0 ** (MIN_EXPONENT - 1)  # half a step of the finest grid there is
    error = (rounded - terms).abs().max().item()
    assert error <= max(2.0**bound * len(values) * 2.0**-24, finest)


def test_values_below_the_finest_grid_do_not_disturb() -> None:
    tiny = torch.tensor([1e-38, -1e-44, 0.0])
    assert round_to_grid(tiny, grid_exponent(MIN_EXPONENT, terms=8)).tolist() == [0.0, 0.0, 0.0]


def test_a_bound_has_headroom_and_shrinks_slowly() -> None:
    assert next_bound(MIN_EXPONENT, 1.0) == HEADROOM_BITS
    assert next_bound(10, 1.0) == 9
    assert next_bound(HEADROOM_BITS, 1.0) == HEADROOM_BITS
    assert next_bound(MIN_EXPONENT, 0.0) == MIN_EXPONENT


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


@settings(max_examples=60)
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
