"""Runs that train one policy each learn what they learn undisturbed, whatever dies in any order.

A failure names the seed that repeats it.
"""

from __future__ import annotations

import random

import pytest
from doubles.cast_runs import CastJob


def wrong_under(seed: int) -> list[str]:
    return CastJob(random.Random(f"cast {seed}")).play()


def test_whatever_dies_each_policy_learns_the_same() -> None:
    assert {seed: found for seed in range(40) if (found := wrong_under(seed))} == {}


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_whatever_dies_in_thousands_of_orders_each_policy_learns_the_same() -> None:
    assert {seed: found for seed in range(5000) if (found := wrong_under(seed))} == {}
