"""Comparisons of arrays and of value trees report exactly their differences."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.ckpt.geometry.element_types import DTYPES
from holdfast.ckpt.inspect.compare import (
    Tally,
    Tolerance,
    ValueDifference,
    compare_values,
    merge,
    tally,
)

EXACT = Tolerance()


def compared(
    a: object, b: object, dtype: str = "float64", *, tolerance: Tolerance = EXACT
) -> Tally:
    kind = DTYPES[dtype].numpy
    one, other = np.asarray(a, dtype=kind), np.asarray(b, dtype=kind)
    return tally(one, other, DTYPES[dtype], tolerance=tolerance, offset=(0,) * one.ndim)


def test_equal_arrays_have_no_differences() -> None:
    found = compared([[1.0, np.nan]], [[1.0, np.nan]])
    assert found == Tally(elements=2)


def test_the_first_the_largest_and_the_relatively_largest_are_found() -> None:
    a = np.ones((3, 4))
    b = a.copy()
    b[0, 3], b[1, 1], b[2, 0] = 1.5, 100.0, 1.0001
    a[2, 2], b[2, 2] = 1e-8, -1e-8
    found = compared(a, b)
    assert (found.differing, found.outside) == (4, 4)
    assert found.first is not None and found.first.index == (0, 3)
    assert found.largest is not None and found.largest.index == (1, 1)
    assert (found.largest.a, found.largest.b, found.largest.absolute) == (1.0, 100.0, 99.0)
    assert found.largest_relative is not None
    assert (found.largest_relative.index, found.largest_relative.relative) == ((2, 2), 2.0)


def test_zeros_of_different_sign_differ_in_bits_and_not_in_value() -> None:
    found = compared([0.0], [-0.0])
    assert (found.differing, found.outside) == (1, 0)


def test_nan_is_within_tolerance_of_nan_only() -> None:
    other_nan = np.array([0x7FF8000000000001], dtype="u8").view("f8")
    assert compared([np.nan], other_nan).outside == 0
    found = compared([np.nan, 1.0, 2.0], [1.0, np.nan, 3.0], tolerance=Tolerance(atol=9.0))
    assert (found.outside, found.nan_a, found.nan_b) == (2, 1, 1)
    assert found.largest is not None and found.largest.index == (2,)


def test_an_infinity_is_within_no_tolerance() -> None:
    found = compared([np.inf, np.inf], [-np.inf, 1.0], tolerance=Tolerance(rtol=1.0, atol=1e300))
    assert found.outside == 2
    assert found.largest is not None
    assert found.largest.absolute == np.inf


@pytest.mark.parametrize(("atol", "rtol", "outside"), [(0.5, 0, 0), (0.4, 0, 1), (0, 0.334, 0)])
def test_tolerance_is_symmetric(atol: float, rtol: float, outside: int) -> None:
    tolerance = Tolerance(atol=atol, rtol=rtol)
    assert compared([1.0], [1.5], tolerance=tolerance).outside == outside
    assert compared([1.5], [1.0], tolerance=tolerance).outside == outside


@pytest.mark.parametrize(
    ("dtype", "a", "b", "apart"),
    [
        ("int64", 2**53, 2**53 + 1, 1.0),
        ("int64", -(2**63), 2**63 - 1, float(2**64 - 1)),
        ("uint64", 0, 2**64 - 1, float(2**64 - 1)),
        ("uint8", 250, 5, 245.0),
        ("bool", True, False, 1.0),
        ("complex64", 3 + 4j, 0, 5.0),
        ("float16", 1.0, 1.5, 0.5),
    ],
)
def test_distances_are_exact(dtype: str, a: complex, b: complex, apart: float) -> None:
    found = compared([a], [b], dtype)
    assert found.largest is not None
    assert found.largest.absolute == apart


def test_bfloat16_and_float8_are_compared_in_their_own_values() -> None:
    found = compared([0x3F80, 0x4000], [0x3F80, 0x3F80], "bfloat16")
    assert found.largest is not None
    assert (found.largest.a, found.largest.b, found.largest.index) == (2.0, 1.0, (1,))
    found = compared([0x38], [0x40], "float8_e4m3fn")
    assert found.largest is not None and (found.largest.a, found.largest.b) == (1.0, 2.0)


def test_a_byte_of_float4_counts_once_with_the_number_that_differs() -> None:
    found = compared([0x21], [0x31], "float4_e2m1fn_x2")
    assert (found.elements, found.differing, found.outside) == (1, 1, 1)
    assert found.largest is not None and (found.largest.a, found.largest.b) == (1.0, 1.5)


def test_wide_complex_numbers_are_compared() -> None:
    found = compared([1 + 1j, 2], [1 + 2j, 2], "complex128")
    assert (found.differing, found.largest and found.largest.absolute) == (1, 1.0)


def test_blocks_of_large_arrays_add_up() -> None:
    a = np.zeros(300_000)
    b = a.copy()
    b[[131_072, 299_999]] = 1.0, 2.0
    found = compared(a, b)
    assert (found.elements, found.differing) == (300_000, 2)
    assert found.first is not None and found.first.index == (131_072,)
    assert found.largest is not None and found.largest.index == (299_999,)


def test_boxes_know_their_place_and_add_up() -> None:
    kind = DTYPES["float64"]
    one = tally(np.zeros((1, 2)), np.ones((1, 2)), kind, tolerance=EXACT, offset=(4, 6))
    two = tally(np.zeros((1, 2)), np.full((1, 2), 3.0), kind, tolerance=EXACT, offset=(5, 6))
    both = merge(one, two)
    assert (both.elements, both.differing) == (4, 4)
    assert both.first is not None and both.first.index == (4, 6)
    assert both.largest is not None and both.largest.index == (5, 6)


def test_scalars_are_compared() -> None:
    found = compared(1.0, 2.0)
    assert found.first is not None and found.first.index == ()


def test_values_are_compared_leaf_by_leaf() -> None:
    a = {"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}, "name": "x", "n": {"$float": "nan"}}
    b = {"lr": 0.1, "betas": {"$tuple": [0.9, 0.95]}, "n": {"$float": "nan"}, "deep": {"k": [1]}}
    assert list(compare_values(a, b, tolerance=EXACT)) == [
        ValueDifference(path="betas.1", a=0.99, b=0.95),
        ValueDifference(path="name", a="x"),
        ValueDifference(path="deep.k.0", b=1),
    ]


def test_values_may_differ_by_the_tolerance_but_not_in_type() -> None:
    near = Tolerance(rtol=0.01)
    assert not list(compare_values({"x": 1.0}, {"x": 1.005}, tolerance=near))
    for a, b in [(1, 1.0), (True, 1), ("1", 1), (None, 0), ([], {})]:
        assert list(compare_values({"x": a}, {"x": b}, tolerance=near)), (a, b)


def test_dicts_with_other_keys_are_compared_by_key() -> None:
    a, b = {"m": {"$map": [[1, "x"], [2, "y"]]}}, {"m": {"$map": [[1, "x"], [2, "z"]]}}
    (found,) = compare_values(a, b, tolerance=EXACT)
    assert (found.path, found.a, found.b) == ("m.2", "y", "z")
