"""Assignments and shares against a brute-force search for the best ones."""

from __future__ import annotations

import itertools

import pytest
from doubles import fakes
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.membership.records import MeshSize
from holdfast.elastic.planning.assign import assign, assign_edges, edges_of
from holdfast.elastic.planning.holdings import BlockHoldings
from holdfast.elastic.planning.placing import Placer
from holdfast.elastic.planning.shares import MOST_RATIO, by_speed, even, part, step_time

gains = st.integers(1, 6).flatmap(
    lambda places: st.tuples(
        st.just(places),
        st.lists(
            st.dictionaries(st.integers(0, places - 1), st.integers(1, 9), max_size=places),
            max_size=6,
        ),
    )
)


def value(rows: list[dict[int, int]], found: list[int | None]) -> int:
    return sum(row[place] for row, place in zip(rows, found, strict=True) if place is not None)


def best(rows: list[dict[int, int]], taken: frozenset[int] = frozenset()) -> int:
    if not rows:
        return 0
    row, *rest = rows
    with_one = [row[place] + best(rest, taken | {place}) for place in row if place not in taken]
    return max([best(rest, taken), *with_one])


@settings(max_examples=examples(150), deadline=None)
@given(gains)
def test_small_assignments_are_the_best(case: tuple[int, list[dict[int, int]]]) -> None:
    places, rows = case
    found = assign(rows, places=places)
    used = [place for place in found if place is not None]
    assert len(used) == len(set(used))
    assert value(rows, found) == best(rows)


@settings(max_examples=examples(150), deadline=None)
@given(gains)
def test_large_assignments_are_at_least_half_as_good(
    case: tuple[int, list[dict[int, int]]],
) -> None:
    _, rows = case
    found = assign_edges(edges_of(rows), takers=len(rows))
    used = [place for place in found if place is not None]
    assert len(used) == len(set(used))
    assert 2 * value(rows, found) >= best(rows)


def one_by_one(rows: list[dict[int, int]]) -> list[int | None]:
    """Serve the largest gain first, then try each exchange: no arrays, nothing passed over."""
    edges = sorted((-gain, t, place) for t, row in enumerate(rows) for place, gain in row.items())
    place_of: list[int | None] = [None] * len(rows)
    for _, taker, place in edges:
        if place_of[taker] is None and place not in place_of:
            place_of[taker] = place
    for _ in range(2):
        for loss, taker, place in edges:
            mine = place_of[taker]
            other = place_of.index(place) if place in place_of else None
            if mine == place:
                continue
            theirs = rows[other] if other is not None else {}
            now = (rows[taker].get(mine, 0) if mine is not None else 0) + theirs.get(place, 0)
            then = -loss + (theirs.get(mine, 0) if mine is not None else 0)
            if then > now:
                if other is not None:
                    place_of[other] = mine
                place_of[taker] = place
    return [
        place if place is not None and row.get(place, 0) > 0 else None
        for row, place in zip(rows, place_of, strict=True)
    ]


many = st.integers(33, 45).flatmap(
    lambda places: st.tuples(
        st.just(places),
        st.lists(
            st.dictionaries(st.integers(0, places - 1), st.integers(0, 5), max_size=4), max_size=45
        ),
    )
)


@settings(max_examples=examples(150), deadline=None)
@given(many)
def test_many_places_are_given_out_as_if_one_by_one(
    case: tuple[int, list[dict[int, int]]],
) -> None:
    places, rows = case
    assert assign(rows, places=places) == one_by_one(rows)


speeds = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 7.0]), min_size=1, max_size=4)


@settings(max_examples=examples(150), deadline=None)
@given(speeds, st.integers(0, 6))
def test_shares_add_up_and_the_step_is_as_short_as_whole_shares_allow(
    measured: list[float], spare: int
) -> None:
    total = len(measured) + spare
    shares, reason = by_speed(total, measured)
    assert sum(shares) == total
    assert min(shares) >= 1
    assert reason
    known = sorted(speed for speed in measured if speed)
    if not known:
        assert shares == even(total, len(measured))
        return
    typical = known[len(known) // 2]
    ordered = sorted(speed or typical for speed in measured)
    middle, reach = ordered[len(ordered) // 2], MOST_RATIO**0.5
    bounded = [min(max(speed or typical, middle / reach), middle * reach) for speed in measured]
    options = itertools.product(range(1, total + 1), repeat=len(measured))
    least_s = min(step_time(each, bounded) for each in options if sum(each) == total)
    assert step_time(shares, bounded) * 0.95 <= least_s * (1 + 1e-9)


@given(st.lists(st.floats(0.97, 1.03), min_size=2, max_size=8))
def test_shares_of_nearly_equal_ranks_stay_even(measured: list[float]) -> None:
    assert by_speed(4 * len(measured), measured)[0] == (4,) * len(measured)


def test_previous_shares_stay_while_others_would_gain_little() -> None:
    assert by_speed(30, [1.0, 1.02], previous=(14, 16))[0] == (14, 16)
    assert by_speed(30, [1.0, 2.0], previous=(15, 15))[0] == (10, 20)
    assert by_speed(30, [1.0, 1.0], previous=(30,))[0] == (15, 15)


@given(st.integers(1, 40), st.integers(1, 9))
def test_even_parts_leave_no_gap_and_differ_by_one_at_most(microbatches: int, ranks: int) -> None:
    parts = [part(microbatches, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert list(itertools.chain.from_iterable(parts)) == list(range(microbatches))
    sizes = [len(mine) for mine in parts]
    assert max(sizes) - min(sizes) <= 1


def test_parts_follow_the_shares_and_leave_nothing_out() -> None:
    shares = (1, 4, 2)
    parts = [part(7, rank=rank, ranks=3, shares=shares) for rank in range(3)]
    assert list(itertools.chain.from_iterable(parts)) == list(range(7))
    with pytest.raises(ValueError, match="are not of 8 microbatches on 3 ranks"):
        part(8, rank=0, ranks=3, shares=shares)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 7), st.data())
def test_trainers_of_a_world_cut_anew_move_the_fewest_bytes(
    saved: int, data: st.DataObject
) -> None:
    left = sorted(data.draw(st.sets(st.integers(0, saved - 1), min_size=1)))
    names = [f"n{rank}" for rank in range(saved)]
    nodes = [fakes.node(name) for name in names]
    ranks = [(name, fakes.worker(f"trainer/{name[1:]}")) for name in names]
    old = fakes.generation(1, nodes, ranks=ranks)
    mesh = MeshSize(dp=len(left))
    there = [
        fakes.node(names[r], ranks[r][1], inventory=fakes.inventory(names[r], old.snapshots, 5))
        for r in left
    ]
    holdings = BlockHoldings(
        fakes.held(old.snapshots, 5),
        nodes={node.node: node for node in there},
        saved=MeshSize(dp=saved),
        mesh=mesh,
    )
    ready = data.draw(st.permutations([(node, node.workers[0]) for node in there]))
    placed = Placer(mesh, old=None, holdings=holdings).place(ready).ranks
    here = sum(holdings.of(node.node).get(rank, 0) for rank, (node, _) in enumerate(placed))
    assert abs(here - best([dict(holdings.of(node.node)) for node in there])) <= 2 * saved


@settings(max_examples=examples(80), deadline=None)
@given(st.integers(1, 50), st.integers(1, 50), st.data())
def test_many_nodes_hold_together_what_each_of_them_holds(
    saved: int, cut: int, data: st.DataObject
) -> None:
    names = [f"n{rank}" for rank in range(saved)]
    ranks = [(name, fakes.worker(f"trainer/{name[1:]}")) for name in names]
    old = fakes.generation(1, [fakes.node(name) for name in names], ranks=ranks)
    there = {
        name: fakes.node(name, inventory=fakes.inventory(name, old.snapshots, 5)) for name in names
    }
    holdings = BlockHoldings(
        fakes.held(old.snapshots, 5),
        nodes=there,
        saved=MeshSize(dp=saved),
        mesh=MeshSize(dp=cut),
    )
    takers = data.draw(st.lists(st.sampled_from([*names, "new"]), max_size=60))
    edges = holdings.edges(takers)
    if saved == cut:
        assert edges is None
    else:
        assert edges is not None
        found: list[dict[int, int]] = [{} for _ in takers]
        for taker, place, gain in zip(*(each.tolist() for each in edges), strict=True):
            found[taker][place] = gain
        assert found == [dict(holdings.of(node)) for node in takers]
    places = [(data.draw(st.integers(0, cut - 1)), node) for node in takers]
    alone = [holdings.moved(rank, node=node) for rank, node in places]
    assert holdings.moved_in_all(places) == sum(alone)
