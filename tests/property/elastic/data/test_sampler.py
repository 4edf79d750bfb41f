"""Every sample comes once per epoch, every microbatch once per step, in any world."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.data.sampler import Permutation, positions, sample_indices
from holdfast.elastic.randomness import Draws, build_seed

seeds = st.integers(0, (1 << 63) - 1)


@given(size=st.integers(1, 300), seed=seeds, epoch=st.integers(0, 1000))
@settings(deadline=None)
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed=seed, epoch=epoch)
    visited = order.at(range(size)).tolist()
    assert sorted(visited) == list(range(size))
    at = size // 2
    assert order[at] == visited[at]


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = {
        tuple(Permutation(50, seed=seed, epoch=epoch).at(range(50)).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_every_order_of_a_few_samples_is_about_equally_likely() -> None:
    orders = Counter(
        tuple(Permutation(4, seed=seed, epoch=0).at(range(4)).tolist()) for seed in range(4800)
    )
    assert len(orders) == 24
    # chi-squared with 23 degrees of freedom exceeds 60 once in 40,000 times
    assert sum((seen - 200) ** 2 / 200 for seen in orders.values()) < 60


@given(position=st.integers(0, 10**9 - 1), seed=seeds)
@settings(deadline=None)
def test_a_billion_samples_are_permuted_without_a_list(position: int, seed: int) -> None:
    order = Permutation(10**9, seed=seed, epoch=3)
    around = range(max(0, position - 8), min(10**9, position + 8))
    found = order.at(around).tolist()
    assert len(set(found)) == len(found)
    assert all(0 <= index < 10**9 for index in found)
    assert found[position - around.start] == order[position]


def test_positions_outside_the_epoch_are_refused() -> None:
    order = Permutation(5, seed=0, epoch=0)
    with pytest.raises(IndexError, match="5 samples"):
        order.at(range(3, 6))
    with pytest.raises(IndexError, match="5 samples"):
        order[-1]
    with pytest.raises(ValueError, match="0 samples"):
        Permutation(0, seed=0, epoch=0)


@given(
    samples=st.integers(1, 40),
    microbatches=st.integers(1, 6),
    size=st.integers(1, 5),
    steps=st.integers(1, 12),
    seed=seeds,
)
@settings(deadline=None)
def test_the_microbatches_cover_epoch_after_epoch(
    samples: int, microbatches: int, size: int, steps: int, seed: int
) -> None:
    drawn = [
        index
        for step in range(steps)
        for microbatch in range(microbatches)
        for index in sample_indices(
            positions(step=step, microbatch=microbatch, microbatches=microbatches, size=size),
            samples=samples,
            seed=seed,
        )
    ]
    assert len(drawn) == steps * microbatches * size
    for start in range(0, len(drawn) - samples + 1, samples):
        assert sorted(drawn[start : start + samples]) == list(range(samples))


@given(seed=seeds)
@settings(deadline=None)
def test_every_stream_has_its_own_seed(seed: int) -> None:
    phases = [Draws(seed=seed, step=step, phase=phase) for step in range(6) for phase in range(4)]
    streams = [phase.microbatch(number) for phase in phases for number in range(6)]
    streams += [phase.stage(number, stage=1) for phase in phases for number in range(6)]
    streams += [phase.before_microbatches() for phase in phases]
    streams += [phase.after_microbatches() for phase in phases]
    streams.append(build_seed(seed))
    assert len(set(streams)) == len(streams)
    assert all(0 <= stream < 1 << 63 for stream in streams)
