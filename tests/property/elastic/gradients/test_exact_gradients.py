"""Gradients of a whole pass over ranks that are threads: no split of the work changes them."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.elastic.config import Exact
from holdfast.elastic.errors import NotFiniteError
from holdfast.elastic.gradients.exact import FLOAT32, INT64
from holdfast.elastic.gradients.mean import Gradients
from holdfast.elastic.gradients.native import fixed_point
from holdfast.elastic.gradients.rounding import LEVEL_BITS

WIDTH = 3
METHODS: list[Exact] = ["float32", "int64"]


class Together:
    """Ranks that meet: their values are reduced in the order of the ranks."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._brought: list[torch.Tensor] = [torch.zeros(())] * size

    def meet(self, rank: int, tensor: torch.Tensor, combine: Callable[..., torch.Tensor]) -> None:
        self._brought[rank] = tensor.clone()
        self._barrier.wait()
        found = functools.reduce(combine, self._brought)
        self._barrier.wait()
        tensor.copy_(found)


@dataclass
class Rank:
    """A rank's side of the meetings."""

    together: Together
    rank: int

    def max_(self, tensor: torch.Tensor) -> None:
        self.together.meet(self.rank, tensor, torch.maximum)

    def sum_(self, tensor: torch.Tensor) -> None:
        self.together.meet(self.rank, tensor, torch.add)

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        self.sum_(tensor)
        return lambda: None


@dataclass
class Outcome:
    """A rank's mean gradient, and the bounds afterwards."""

    mean: torch.Tensor
    bounds: dict[str, int]


def step(
    shares: Sequence[Sequence[torch.Tensor]], *, exact: Exact, bounds: dict[str, int] | None = None
) -> Outcome:
    """Make the mean gradient of the microbatches, each rank those of its share in that order."""
    together = Together(len(shares))
    terms = sum(len(share) for share in shares)

    def run(rank: int) -> Outcome:
        share, own = shares[rank], dict(bounds or {})
        weight = nn.Parameter(torch.zeros_like(share[0]))
        gradients = Gradients(
            {"model": nn.ParameterList([weight])},
            Rank(together, rank),
            microbatches=terms,
            exact=exact,
            bounds=own,
        )
        gradients.begin_pass()
        for number, wanted in enumerate(share):
            gradients.begin_microbatch(last=number == len(share) - 1)
            gradients.backward((weight * wanted).sum())
        gradients.end_pass(backwards=len(share))
        gradients.end_step()
        assert weight.grad is not None
        return Outcome(weight.grad.clone(), own)

    with ThreadPoolExecutor(len(shares)) as pool:
        found = list(pool.map(run, range(len(shares))))
    assert all(bits(each.mean) == bits(found[0].mean) for each in found)
    assert all(each.bounds == found[0].bounds for each in found)
    return found[0]


def same_by_torch(
    found: Outcome,
    microbatches: Sequence[torch.Tensor],
    *,
    exact: Exact,
    bounds: dict[str, int] | None = None,
) -> bool:
    """Return whether a rank without the compiled functions gets the same bits."""
    with patch.object(fixed_point, "library", lambda: None):
        other = step([microbatches], exact=exact, bounds=bounds)
    return bits(other.mean) == bits(found.mean) and other.bounds == found.bounds


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the very bits, so that 0 and -0 differ."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]).tolist()


def shared(draw: Any, microbatches: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Deal the microbatches out to one to four ranks, none of which goes without."""
    mixed = draw(st.permutations(microbatches))
    size = draw(st.integers(1, min(4, len(mixed))))
    cuts = draw(
        st.lists(st.integers(1, len(mixed) - 1), min_size=size - 1, max_size=size - 1, unique=True)
        if size > 1
        else st.just([])
    )
    edges = [0, *sorted(cuts), len(mixed)]
    return [list(mixed[lo:hi]) for lo, hi in pairwise(edges)]


any_size = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100
)
near = st.floats(width=32, min_value=-8, max_value=8)
rows = st.one_of(
    st.lists(near, min_size=WIDTH, max_size=WIDTH),
    st.lists(any_size, min_size=WIDTH, max_size=WIDTH),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@settings(max_examples=examples(60), deadline=None)
@given(
    exact=st.sampled_from(METHODS),
    dtype=dtypes,
    rows=st.lists(rows, min_size=1, max_size=9),
    data=st.data(),
)
def test_no_split_of_the_microbatches_and_no_world_size_shows_in_the_mean(
    exact: Exact, dtype: torch.dtype, rows: list[list[float]], data: st.DataObject
) -> None:
    microbatches = [torch.tensor(row).to(dtype) for row in rows]
    alone = step([microbatches], exact=exact)
    split = step(shared(data.draw, microbatches), exact=exact)
    assert bits(split.mean) == bits(alone.mean)
    assert split.bounds == alone.bounds
    assert same_by_torch(alone, microbatches, exact=exact)


@settings(max_examples=examples(60), deadline=None)
@given(exact=st.sampled_from(METHODS), rows=st.lists(rows, min_size=1, max_size=9))
def test_the_mean_is_as_near_as_the_grid_allows(exact: Exact, rows: list[list[float]]) -> None:
    microbatches = [torch.tensor(row) for row in rows]
    found = step([share for share in (microbatches[::2], microbatches[1::2]) if share], exact=exact)
    method = INT64 if exact == "int64" else FLOAT32
    largest = max(abs(value) for row in rows for value in row)
    bound = math.frexp(largest)[1] + LEVEL_BITS if largest else -100
    grid = 2.0 ** method.grid(max(bound, -100), terms=len(rows))
    for at in range(WIDTH):
        true = math.fsum(float(each[at]) for each in microbatches) / len(rows)
        # half a step of the grid for every term, and roundings of the sums and the mean to float32
        assert abs(found.mean[at].item() - true) <= grid / 2 + largest * 2.0**-22 + 2.0**-149


@settings(max_examples=examples(30), deadline=None)
@given(
    exact=st.sampled_from(METHODS),
    growth=st.integers(0, 40),
    at=st.integers(0, 3),
    size=st.sampled_from([1, 2, 4]),
)
def test_a_gradient_that_outgrows_its_headroom_is_summed_to_the_same_result(
    exact: Exact, growth: int, at: int, size: int
) -> None:
    small = [torch.tensor([0.6, -0.1, 0.3]) * (1 + number / 7) for number in range(4)]
    bounds = step([small], exact=exact).bounds
    grown = [each * 2.0**growth if number == at else each for number, each in enumerate(small)]
    found = step([grown[rank::size] for rank in range(size)], exact=exact, bounds=bounds)
    true = [math.fsum(float(each[at]) for each in grown) / 4 for at in range(WIDTH)]
    assert found.mean.tolist() == pytest.approx(true, rel=1e-4, abs=2.0 ** (growth - 20))
    again = step([grown], exact=exact, bounds=bounds)
    assert bits(found.mean) == bits(again.mean)
    assert found.bounds == again.bounds
    assert same_by_torch(found, grown, exact=exact, bounds=bounds)


@pytest.mark.parametrize("exact", METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_ranks_gradient_that_is_not_finite_is_told_on_every_rank(
    exact: Exact, value: float
) -> None:
    good, bad = torch.ones(WIDTH), torch.tensor([1.0, value, 1.0])
    with pytest.raises(NotFiniteError, match=r"model\.0 is not finite"):
        step([[good], [good, bad], [good]], exact=exact)


@pytest.mark.parametrize("exact", METHODS)
def test_subnormal_gradients_do_no_harm(exact: Exact) -> None:
    tiny = [torch.tensor([1e-45, -1e-40, 0.0]) for _ in range(4)]
    found = step([tiny[:1], tiny[1:]], exact=exact)
    kept = exact == "int64"
    assert bits(found.mean) == bits(tiny[0] if kept else torch.zeros(WIDTH))
    beside_large = [*tiny, torch.full((WIDTH,), 1e20)]
    found = step([beside_large[:2], beside_large[2:]], exact=exact)
    assert found.mean.tolist() == pytest.approx([2e19] * WIDTH, rel=1e-5)


def test_a_sum_that_float32_cannot_hold_is_refused_and_fixed_point_holds_it() -> None:
    large = [torch.full((WIDTH,), 3e38), torch.full((WIDTH,), 3e38), torch.full((WIDTH,), -3e38)]
    with pytest.raises(NotFiniteError, match=r'the sum of 3 may overflow.*exact="int64"'):
        step([large[:1], large[1:]], exact="float32")
    found = step([large[:1], large[1:]], exact="int64")
    assert found.mean.tolist() == pytest.approx([1e38] * WIDTH, rel=1e-6)


@pytest.mark.parametrize("exact", METHODS)
def test_zero_has_one_sign(exact: Exact) -> None:
    negative = [torch.full((WIDTH,), -0.0) for _ in range(3)]
    for shares in ([negative], [negative[:1], negative[1:]]):
        assert bits(step(shares, exact=exact).mean) == [0] * WIDTH
