"""Series are down-sampled into a bounded number of buckets, with exact counts."""

from __future__ import annotations

import math

import pytest

from holdfast.tools.live.series import Series


def test_few_values_keep_their_places() -> None:
    series = Series(most=8)
    for place in range(5):
        series.add(place + 0.25, place)
    assert [(at, found.mean) for at, found in series.items()] == [(n, n) for n in range(5)]


def test_a_million_values_fit_into_the_buckets_and_none_is_lost() -> None:
    series = Series(most=100)
    for place in range(100_000):
        series.add(float(place), 1.0)
    found = [bucket for _, bucket in series.items()]
    assert len(found) <= 100
    assert sum(bucket.count for bucket in found) == 100_000
    assert series.width == 1024


def test_least_and_most_of_a_bucket_are_those_of_its_values() -> None:
    series = Series(most=2)
    for place, value in enumerate([5.0, -1.0, 7.0, 2.0]):
        series.add(place, value)
    least = min(found.least for _, found in series.items())
    most = max(found.most for _, found in series.items())
    assert (least, most) == (-1.0, 7.0)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_left_out(odd: float) -> None:
    series = Series()
    series.add(0.0, odd)
    series.add(odd, 0.0)
    assert len(series) == 0


def test_a_series_needs_room() -> None:
    with pytest.raises(ValueError, match="2 buckets or more"):
        Series(most=1)
