"""Meetings of two islands: who meets whom, and the step, whose bits are the same on both sides."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.errors import SeaError
from holdfast.elastic.sea import gossip, payload
from holdfast.elastic.sea.outer import SMALLEST, Floats
from holdfast.elastic.sea.pairs import pairs_of
from holdfast.elastic.sea.settings import Nesterov

NAMES = st.lists(st.text("abcdef", min_size=1, max_size=4), unique=True, max_size=40)


@given(NAMES, st.integers(0, 1 << 40), st.randoms())
def test_each_island_meets_one_other_and_at_most_one_nobody(
    names: list[str], tide: int, draw: Any
) -> None:
    found = pairs_of(names, key="k", tide=tide)
    assert all(found[other] == one and other != one for one, other in found.items())
    assert len(names) - len(found) == len(names) % 2
    assert found.keys() <= set(names)
    assert pairs_of(draw.sample(names, len(names)), key="k", tide=tide) == found


def test_every_pair_is_about_as_frequent_as_every_other() -> None:
    names = [f"i{at}" for at in range(6)]
    found = Counter(pairs_of(names, key="k", tide=tide)["i0"] for tide in range(1000))
    assert len(found) == 5
    assert min(found.values()) > 150
    other = [pairs_of(names, key="other", tide=tide)["i0"] for tide in range(20)]
    assert other != [pairs_of(names, key="k", tide=tide)["i0"] for tide in range(20)]


def _numbers(seed: int, n: int, *, islands: int = 2) -> list[tuple[Floats, Floats, Floats]]:
    """Return progress, weights and momentum of islands."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-6, 3)
    drawn = rng.standard_normal((islands, 3, n)) * scale
    return [tuple(each.astype(np.float32)) for each in drawn]


def _met(
    seed: int, n: int, bits: int, weights: tuple[int, int]
) -> list[tuple[Floats, Floats, Floats, Floats]]:
    """Return what each of two islands computes: mean, middle less its own, weights, momentum."""
    islands = _numbers(seed, n)
    sent = [gossip.encode(own, w, bits) for own, w, _ in islands]
    found = []
    for me, (_, w, m) in enumerate(islands):
        other = 1 - me  # each lists itself first: the order must not matter
        order = [(sent[me], weights[me]), (sent[other], weights[other])]
        both = [(*gossip.split(data, bits), weight) for data, weight in order]
        works = [(own, weight) for own, _, weight in both]
        mean = payload.mean(works, whole=sum(weights), bits=bits, n=n)
        ends = [(data, 1) for _, data, _ in both]
        middle = payload.mean(ends, whole=2, bits=gossip.WEIGHT_BITS, n=n)
        apart = middle - payload.value(both[0][1], gossip.WEIGHT_BITS, n)
        new_w, new_m = w.copy(), m.copy()
        gossip.met(new_w, new_m, mean, apart, Nesterov(0.7, 0.5))
        found.append((mean, middle, new_w, new_m))
    return found


@settings(max_examples=examples(30), deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.integers(0, 600),
    st.sampled_from([4, 8, 16, 32]),
    st.tuples(st.integers(1, 1000), st.integers(1, 1000)),
)
def test_both_sides_of_a_meeting_have_the_same_mean_and_middle(
    seed: int, n: int, bits: int, weights: tuple[int, int]
) -> None:
    one, other = _met(seed, n, bits, weights)
    assert one[0].tobytes() == other[0].tobytes()
    assert one[1].tobytes() == other[1].tobytes()


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 300), st.floats(0.01, 2), st.floats(0, 0.99))
def test_a_step_is_the_formula_with_each_operation_rounded(
    seed: int, n: int, lr: float, momentum: float
) -> None:
    (w, m, g), (apart, _, _) = _numbers(seed, n)
    pull = np.float32(1 - momentum)
    right_m = np.float32(m * np.float32(momentum)) - np.float32(g * np.float32(lr))
    right_m = np.float32(right_m + np.float32(apart * pull))
    right_w = np.float32(w + right_m)
    gossip.met(w, m, g, apart, Nesterov(lr, momentum))
    np.testing.assert_array_equal(m, np.where(np.abs(right_m) < SMALLEST, 0, right_m))
    np.testing.assert_array_equal(w, np.where(np.abs(right_w) < SMALLEST, 0, right_w))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.95])
def test_islands_that_only_meet_come_together(momentum: float) -> None:
    rng, n, names = np.random.default_rng(1), 64, [f"i{at}" for at in range(8)]
    islands = {name: [rng.standard_normal(n).astype("f4"), np.zeros(n, "f4")] for name in names}
    middle = np.mean([w for w, _ in islands.values()], axis=0)
    spread = [np.std([w for w, _ in islands.values()], axis=0).max()]
    for tide in range(round(30 / (1 - momentum))):
        before = {name: w.copy() for name, (w, _) in islands.items()}
        for one, other in pairs_of(names, key="k", tide=tide).items():
            apart = (before[one] + before[other]) / np.float32(2) - before[one]
            gossip.met(*islands[one], np.zeros(n, "f4"), apart, Nesterov(0.7, momentum))
    spread.append(np.std([w for w, _ in islands.values()], axis=0).max())
    assert spread[1] < 1e-2 * spread[0]
    np.testing.assert_allclose(np.mean([w for w, _ in islands.values()], axis=0), middle, atol=1e-4)


def test_a_payload_of_a_range_of_blocks_is_a_part_of_the_whole() -> None:
    ((own, weights, _),) = _numbers(3, 1000, islands=1)
    data, width = gossip.encode(own, weights, 4), gossip.row_bytes(4)
    assert len(data) == 4 * width
    part = gossip.encode(own[256:512], weights[256:512], 4)
    assert data[width : 2 * width] == part
    both = gossip.split(data, 4)
    assert both == (payload.encode(own, 4), payload.encode(weights, gossip.WEIGHT_BITS))
    with pytest.raises(SeaError, match="finite"):
        gossip.encode(own, weights * np.float32(np.inf), 4)


def test_the_last_merge_is_the_middle_moved_by_the_mean_progress() -> None:
    ((mean, middle, _),) = _numbers(4, 300, islands=1)
    found = gossip.merged(middle, mean, Nesterov(0.5, 0.9))
    np.testing.assert_array_equal(found, middle - mean * np.float32(0.5))
