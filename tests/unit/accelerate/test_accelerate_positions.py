"""A position becomes the skip of a loader that shares out batches alike or otherwise."""

from __future__ import annotations

import pytest

from holdfast.adapters.accelerate.positions import (
    LoaderPosition,
    LoaderShares,
    SkipPlan,
    plan_skip,
)
from holdfast.ckpt import StateError

TWO = LoaderShares(processes=2, batch_size=4, is_split=False)
ONE = LoaderShares(processes=1, batch_size=4, is_split=False)
AT = LoaderPosition(epoch=1, batches=3, begun_at=8, samples=32, checksum=5, shares=TWO)


def test_it_comes_back_from_plain_values() -> None:
    assert LoaderPosition.of_saved(AT.saved()) == AT


def test_the_same_shares_skip_what_was_skipped_and_then_batches() -> None:
    assert plan_skip(AT, TWO, name="loader") == SkipPlan(samples=8, batches=3)


def test_other_shares_skip_samples_of_the_common_order() -> None:
    assert plan_skip(AT, ONE, name="loader") == SkipPlan(samples=32)


def test_an_epoch_that_is_over_skips_all() -> None:
    over = LoaderPosition(epoch=1, batches=7, samples=56, is_over=True, shares=TWO)
    assert plan_skip(over, ONE, name="loader") == SkipPlan(batches=None)


def test_the_begin_of_an_epoch_skips_nothing() -> None:
    assert plan_skip(LoaderPosition(epoch=2, shares=TWO), ONE, name="loader") is None


def test_an_iterable_data_set_skips_whole_batches_or_is_refused() -> None:
    stream = LoaderPosition(epoch=0, batches=3, has_order=False, shares=TWO)
    assert plan_skip(stream, ONE, name="loader") == SkipPlan(batches=6)
    split = LoaderShares(processes=3, batch_size=12, is_split=True)
    assert plan_skip(stream, split, name="loader") == SkipPlan(batches=2)
    three = LoaderShares(processes=3, batch_size=4, is_split=False)
    assert plan_skip(stream, three, name="loader") == SkipPlan(batches=2)
    for size in (7, None):
        unknown = LoaderShares(processes=1, batch_size=size, is_split=False)
        with pytest.raises(StateError, match=r"loader: 3 batches .* start 2 processes"):
            plan_skip(stream, unknown, name="loader")
