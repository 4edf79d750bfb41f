"""Compiled fixed-point sums and rounding have the bits of torch's operations, on every path."""

from __future__ import annotations

import math
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.elastic.gradients.exact import INT64, exponent_above, round_to_grid
from holdfast.elastic.gradients.native import fixed_point

ANY = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODEST = st.floats(-1024, 1024, width=32)


@pytest.fixture(params=["wide", "narrow"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """The functions for wide registers where there are any, and those for all processors."""
    found = fixed_point.library()
    assert found is not None, "the package is installed with its compiled part"
    if request.param == "narrow":
        found.grid_narrow()
    yield
    found.grid_prepare()


def numbers(
    element: st.SearchStrategy[float], *, most: int = 40
) -> st.SearchStrategy[torch.Tensor]:
    """Return float32 tensors, also of none, and of more than a wide register holds."""
    return st.lists(element, max_size=40).map(lambda v: torch.tensor(v, dtype=torch.float32))


def by_torch(total: torch.Tensor | None, values: torch.Tensor, grid: int) -> torch.Tensor:
    with patch.object(fixed_point, "library", lambda: None):
        return INT64.added(total, values, grid)


@given(values=st.lists(numbers(MODEST), min_size=1, max_size=4), fine=st.integers(0, 40))
def test_sums_have_the_bits_of_torch(values: list[torch.Tensor], fine: int) -> None:
    shortest = min(map(len, values))
    total = expected = None
    for each in (whole[:shortest] for whole in values):
        expected = by_torch(expected, each, -fine)
        added = fixed_point.add(total, [each], -fine)
        assert added is not None
        total, peak = added
        assert peak == (float(each.abs().max()) if len(each) else 0.0)
    assert total is not None
    assert expected is not None
    assert torch.equal(total, expected)


@given(
    values=st.lists(st.tuples(MODEST, ANY, ANY), max_size=40),
    fine=st.integers(0, 40),
    is_first=st.booleans(),
)
def test_two_at_once_are_one_after_the_other(
    values: list[tuple[float, float, float]], fine: int, is_first: bool
) -> None:
    before, one, other = torch.tensor(values, dtype=torch.float32).reshape(-1, 3).t().contiguous()
    room = torch.full(before.shape, -1)
    start = None if is_first else by_torch(None, before, -fine)
    known = None if start is None else start.clone()
    apart: tuple[torch.Tensor | None, float] = (known, 0.0)
    for each in (one, other):
        added = fixed_point.add(apart[0], [each], -fine)
        assert added is not None
        apart = added[0], max(apart[1], added[1])
    together = fixed_point.add(start, [one, other], -fine, room=room)
    assert together is not None
    assert apart[0] is not None
    assert torch.equal(together[0], apart[0])
    assert together[1] == apart[1]
    assert (together[0] is room) == is_first
    fixed_point.take(together[0], [one, other], -fine)
    expected = torch.zeros_like(room) if is_first else by_torch(None, before, -fine)
    assert torch.equal(together[0], expected)


@given(before=numbers(MODEST), values=st.data(), fine=st.integers(-40, 60))
def test_what_is_taken_was_never_there(
    before: torch.Tensor, values: st.DataObject, fine: int
) -> None:
    exactly = st.lists(ANY, min_size=len(before), max_size=len(before))
    odd = torch.tensor(values.draw(exactly), dtype=torch.float32)
    total = by_torch(None, before, -20)
    known = total.clone()
    added = fixed_point.add(total, [odd], -fine)
    assert added is not None
    largest = float(odd.abs().nan_to_num(nan=math.inf, posinf=math.inf).max()) if len(odd) else 0.0
    assert added[1] == largest
    fixed_point.take(total, [odd], -fine)
    assert torch.equal(total, known)


@given(
    sums=st.lists(st.integers(-(2**62), 2**62), max_size=40),
    grid=st.integers(-120, 20),
    terms=st.integers(1, 5000),
)
def test_means_are_those_of_float64_rounded_once(sums: list[int], grid: int, terms: int) -> None:
    total = torch.tensor(sums, dtype=torch.int64)
    mean = fixed_point.mean(total, grid, terms=terms)
    with patch.object(fixed_point, "library", lambda: None):
        expected = INT64.mean(total, grid, terms=terms).float()
    assert mean is not None
    assert torch.equal(mean, expected)


@given(values=numbers(FINITE), digits=st.integers(4, 26))
def test_rounding_has_the_bits_of_torch(values: torch.Tensor, digits: int) -> None:
    peak = float(values.abs().max()) if len(values) else 0.0
    grid = max(exponent_above(peak) - digits, -100)
    found = fixed_point.rounded(values, grid)
    assert found is not None
    assert found[1] == peak
    expected = round_to_grid(values, grid)
    assert torch.equal(found[0].view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(4, 3).t(),
        torch.zeros(3, requires_grad=True),
        torch.zeros(3, device="meta"),
    ],
    ids=["float64", "bfloat16", "strided", "in a graph", "without memory"],
)
def test_other_numbers_are_left_to_torch(values: torch.Tensor) -> None:
    assert fixed_point.add(None, [values], -20) is None
    assert fixed_point.rounded(values, -20) is None
    assert fixed_point.mean(values, -20, terms=2) is None
