"""Statistics of a stream equal those of the whole array, for any pieces."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.ckpt.inspect.statistics import Accumulator


def seen(numbers: np.ndarray, *, pieces: int = 1) -> Accumulator:
    whole = Accumulator()
    for piece in np.array_split(numbers, pieces):
        part = Accumulator()
        part.add(piece)
        whole.merge(part.part())
    return whole


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2", "<i8", "|i1"])
def test_moments_and_extremes_are_numpys(dtype: str, pieces: int) -> None:
    numbers = (np.random.default_rng(1).standard_normal(300_001) * 20 + 3).astype(dtype)
    found = seen(numbers, pieces=pieces).summary()
    wide = numbers.astype(float)
    assert (found.count, found.finite) == (len(wide), len(wide))
    assert (found.minimum, found.maximum) == (wide.min(), wide.max())
    assert found.zeros == (wide == 0).sum()
    assert found.mean == pytest.approx(wide.mean(), rel=1e-12)
    assert found.std == pytest.approx(wide.std(), rel=1e-12)
    assert found.norm == pytest.approx(np.linalg.norm(wide), rel=1e-12)


def test_quantiles_are_right_to_the_width_of_a_bin() -> None:
    numbers = np.random.default_rng(2).standard_normal(100_000) * np.float32(1e-3)
    for share, value in seen(numbers).summary().quantiles.items():
        wanted = np.quantile(numbers, float(share), method="inverted_cdf")
        assert value == pytest.approx(wanted, rel=1 / 256)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    found = seen(np.array([1.0, np.nan, np.inf, -np.inf, -3.0, 0.0, -0.0])).summary()
    assert (found.count, found.finite, found.zeros) == (7, 4, 2)
    assert (found.nan, found.positive_infinite, found.negative_infinite) == (1, 1, 1)
    assert (found.minimum, found.maximum, found.mean) == (-3.0, 1.0, -0.5)
    assert found.quantiles["0.5"] == 0.0


@pytest.mark.parametrize("numbers", [np.empty(0), np.full(3, np.nan)])
def test_nothing_finite_has_no_statistics(numbers: np.ndarray) -> None:
    found = seen(numbers)
    assert found.summary().mean is None
    assert found.summary().quantiles == {}
    assert found.bars(5) == []


def test_complex_numbers_count_by_magnitude() -> None:
    found = seen(np.array([3 + 4j, 0], dtype="<c8")).summary()
    assert (found.minimum, found.maximum, found.norm) == (0.0, 5.0, 5.0)


@pytest.mark.parametrize("low", [-2.0, 0.5, -8.0])
def test_bars_hold_every_finite_number_where_it_is(low: float) -> None:
    numbers = np.random.default_rng(3).uniform(low, low + 4, 50_000)
    bars = seen(numbers, pieces=3).bars(10)
    wanted, edges = np.histogram(numbers, 10, range=(numbers.min(), numbers.max()))
    assert sum(bar.count for bar in bars) == len(numbers)
    assert [bar.low for bar in bars] == pytest.approx(edges[:-1].tolist())
    np.testing.assert_allclose([bar.count for bar in bars], wanted, atol=0.005 * len(numbers))


def test_equal_numbers_are_one_bar() -> None:
    (bar,) = seen(np.full(9, 2.5)).bars(10)
    assert (bar.low, bar.high, bar.count) == (2.5, 2.5, 9)


def test_signs_and_zero_keep_their_order() -> None:
    numbers = np.array([-1e30, -1.0, -1e-30, 0.0, 1e-30, 1.0, 1e30])
    found = seen(np.repeat(numbers, 1000), pieces=5)
    edges = [found.summary().quantiles[q] for q in ("0.001", "0.25", "0.5", "0.75", "0.999")]
    np.testing.assert_allclose(edges, [-1e30, -1.0, 0.0, 1.0, 1e30], rtol=1 / 256)
