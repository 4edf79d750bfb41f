"""Portions: every parameter once, in order, and the largest group as small as it can be."""

from __future__ import annotations

import itertools

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.sea.portions import merges_of, portions_of


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.data())
def test_portions_are_as_even_as_contiguous_groups_can_be(
    counts: list[int], data: st.DataObject
) -> None:
    portions = data.draw(st.integers(1, len(counts)))
    found = portions_of(counts, portions)
    assert len(found) == portions
    assert all(found)
    assert [each for group in found for each in group] == list(range(len(counts)))
    cuts = itertools.combinations(range(1, len(counts)), portions - 1)
    best = min(
        max(sum(counts[a:b]) for a, b in itertools.pairwise((0, *cut, len(counts)))) for cut in cuts
    )
    assert max(sum(counts[each] for each in group) for group in found) == best


def test_more_portions_than_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="give portions=2 or fewer"):
        portions_of([3, 4], 3)


@given(st.integers(1, 5), st.integers(0, 40))
def test_merges_of_a_portion_are_counted(portions: int, tide: int) -> None:
    done = [t % portions for t in range(tide)]
    assert [merges_of(p, tide, portions=portions) for p in range(portions)] == [
        done.count(p) for p in range(portions)
    ]
