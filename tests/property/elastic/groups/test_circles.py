"""Any world forms one tree, whose circles are small and which is as flat as they allow."""

from __future__ import annotations

import math

import pytest
from exploring import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.elastic.groups.circles import Ring, WorldScale, path_of, rings_of

WORLDS = st.tuples(st.integers(1, 10_000), st.integers(1, 9), st.integers(0, 3))
"""Ranks, ranks of a node, and ranks that moved to another node."""


def nodes_of(world: tuple[int, int, int]) -> list[str]:
    ranks, node_ranks, moved = world
    found = [f"n{rank // node_ranks}" for rank in range(ranks)]
    for turn in range(min(moved, ranks)):
        found[-1 - turn] = found[0]
    return found


def leaders(ring: Ring) -> list[int]:
    return [circle[0] for circle in ring]


@settings(max_examples=examples(40), deadline=None)
@given(world=WORLDS, fan_out=st.integers(2, 40))
@example(world=(10_000, 1, 0), fan_out=2)
@example(world=(10_000, 8, 3), fan_out=32)
@example(world=(1, 1, 0), fan_out=2)
def test_each_ring_has_the_leaders_of_the_one_before_and_the_last_is_one_circle(
    world: tuple[int, int, int], fan_out: int
) -> None:
    nodes = nodes_of(world)
    rings = rings_of(nodes, fan_out=fan_out)
    members = list(range(len(nodes)))
    for number, ring in enumerate(rings):
        assert sorted(member for circle in ring for member in circle) == sorted(members)
        assert max(map(len, ring)) <= fan_out
        assert number > 0 or all(len({nodes[m] for m in circle}) == 1 for circle in ring)
        members = leaders(ring)
    assert members == [0]
    leaves = len(rings[0])
    assert len(rings) - 1 == round(_turns(leaves, fan_out))
    assert len(rings) - 1 <= math.ceil(math.log(leaves, fan_out)) + 1


def _turns(count: int, fan_out: int) -> int:
    """Return how often a count is divided, rounded up, until it is one."""
    turns = 0
    while count > 1:
        count, turns = -(-count // fan_out), turns + 1
    return turns


@settings(max_examples=examples(40), deadline=None)
@given(world=WORLDS, fan_out=st.integers(2, 40), drawn=st.integers(0, 1 << 30))
def test_every_rank_reaches_the_first_through_the_leaders_of_its_circles(
    world: tuple[int, int, int], fan_out: int, drawn: int
) -> None:
    nodes = nodes_of(world)
    rings = rings_of(nodes, fan_out=fan_out)
    at, hops = drawn % len(nodes), 0
    while at:
        path = path_of(at, rings)
        assert list(path) == sorted(path)
        *led, last = path.values()
        assert all(circle[0] == at for circle in led)
        assert all(1 < len(circle) <= fan_out for circle in path.values())
        at, hops = last[0], hops + 1
    assert hops <= len(rings)


def test_the_parts_of_a_large_node_differ_by_one_at_most() -> None:
    rings = rings_of(["n0"] * 65, fan_out=32)
    assert [len(circle) for circle in rings[0]] == [22, 22, 21]
    assert rings[1] == ((0, 22, 44),)


@pytest.mark.parametrize(("limits", "said"), [({"many": 0}, "many is 0"), ({"fan_out": 1}, "is 1")])
def test_limits_that_form_no_tree_are_refused(limits: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WorldScale(**limits)
