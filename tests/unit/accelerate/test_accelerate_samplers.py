"""Batch samplers record the order of an epoch and skip its beginning."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from holdfast.adapters.accelerate.samplers import (
    OrderMark,
    SkippingBatchSampler,
    WatchedBatchSampler,
)
from holdfast.ckpt import MismatchError, StateError

BATCHES = [[3, 1], [2, 0], [5, 4], [6]]


def watched(batches: Iterable[object] = BATCHES) -> WatchedBatchSampler:
    return WatchedBatchSampler(list(batches), "loader")


def mark_of(batches: Iterable[object]) -> OrderMark:
    sampler = watched(batches)
    assert list(sampler)
    return sampler.mark(None)


def test_a_mark_counts_batches_and_samples() -> None:
    sampler = watched()
    assert list(sampler) == BATCHES
    assert (sampler.mark(2).batches, sampler.mark(2).samples) == (2, 4)
    assert (sampler.mark(None).batches, sampler.mark(None).samples) == (4, 7)
    assert len(sampler) == 4


def test_the_checksum_depends_on_the_order_and_not_on_batches_or_integer_types() -> None:
    wanted = mark_of(BATCHES).checksum
    assert mark_of([[3, 1, 2, 0], [5, 4, 6]]).checksum == wanted
    assert mark_of([3, 1, 2, 0, 5, 4, 6]).checksum == wanted
    assert mark_of([np.array(batch).tolist() for batch in BATCHES]).checksum == wanted
    assert mark_of([[np.int32(i) for i in batch] for batch in BATCHES]).checksum == wanted
    assert mark_of([[1, 3], *BATCHES[1:]]).checksum != wanted
    assert mark_of([[31], [2, 0], [5, 4], [6]]).checksum != wanted


def test_it_leaves_out_the_first_samples_once_if_they_are_those_of_the_save() -> None:
    sampler, at = watched(), mark_of(BATCHES[:2])
    sampler.go_on_once(skip=4, samples=4, checksum=at.checksum, is_end=False)
    assert list(sampler) == BATCHES[2:]
    assert sampler.skipped_batches == 2
    assert list(sampler) == BATCHES
    assert sampler.skipped_batches == 0


def test_samples_of_another_order_are_refused() -> None:
    sampler, at = watched([[1, 3], *BATCHES[1:]]), mark_of(BATCHES[:2])
    sampler.go_on_once(skip=4, samples=4, checksum=at.checksum, is_end=False)
    with pytest.raises(MismatchError, match=r"loader: the 4 samples .*data=False"):
        list(sampler)


def test_fewer_or_more_samples_are_refused() -> None:
    at = mark_of(BATCHES)
    sampler = watched(BATCHES[:3])
    sampler.go_on_once(skip=0, samples=7, checksum=at.checksum, is_end=True)
    with pytest.raises(MismatchError, match="the 7 samples"):
        list(sampler)
    longer = watched([*BATCHES, [9]])
    longer.go_on_once(skip=0, samples=7, checksum=at.checksum, is_end=True)
    with pytest.raises(MismatchError, match="the 7 samples"):
        list(longer)


def test_a_position_inside_a_batch_is_refused_with_a_remedy() -> None:
    sampler, at = watched(), mark_of([[3, 1, 2]])
    sampler.go_on_once(skip=3, samples=3, checksum=at.checksum, is_end=False)
    with pytest.raises(StateError, match=r"sample 3, .* lies inside a batch .* divides 3"):
        list(sampler)


def test_batches_are_skipped_once_and_then_the_caller_is_told() -> None:
    told: list[str] = []
    sampler = SkippingBatchSampler(watched())
    sampler.skip_once(3, lambda: told.append("three"))
    assert (list(sampler), list(sampler)) == (BATCHES[3:], BATCHES)
    sampler.skip_once(None, lambda: told.append("all"))
    assert (list(sampler), told, len(sampler)) == ([], ["three", "all"], 4)
