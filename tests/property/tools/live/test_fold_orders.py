"""Whatever the order and the cuts in which events are read, the view has the same exact counts."""

from __future__ import annotations

import random

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from large_run import training

from holdfast.elastic.events import Event
from holdfast.elastic.events.wire import decode, encode
from holdfast.tools.live.fold import Fold
from holdfast.tools.live.series import Series
from holdfast.tools.live.view import RunView

EVENTS: list[Event] = list(training(5, steps=60, ranks=2, lose_every=17))


def counts(view: RunView) -> dict[str, object]:
    """Return what is exact: all but times that are sums of floats."""
    return {
        "counts": view.counts,
        "step": view.step,
        "generation": view.generation,
        "steps_lost": view.steps_lost,
        "losses": view.losses,
        "state": view.state,
        "nodes": [(node.node, node.state, node.losses) for node in view.nodes],
        "seats": [[(s.seat, s.step, s.alive, s.rank) for s in n.seats] for n in view.nodes],
        "checkpoints": [(row.step, row.state) for row in view.checkpoints.newest],
        "done": view.checkpoints.done,
        "protected": view.protection.step,
        "recoveries": [(r.generation, r.cause, r.victims, r.steps_lost) for r in view.recoveries],
        "progress": [(point.at, point.count, point.most) for point in view.progress.points],
        "messages": sorted((each.at_s, each.text) for each in view.messages),
    }


def view_of(events: list[Event], cuts: list[int]) -> RunView:
    fold, begin = Fold(), 0
    for end in [*sorted(cuts), len(events)]:
        fold.apply(events[begin:end])
        begin = max(begin, end)
        fold.view(now_s=fold.last_s)  # a look changes nothing
    return fold.view(now_s=fold.last_s)


WHOLE = view_of(EVENTS, [])


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(0, len(EVENTS)), max_size=5))
def test_any_order_and_any_cuts_give_the_same_counts(seed: int, cuts: list[int]) -> None:
    shuffled = EVENTS[:]
    random.Random(seed).shuffle(shuffled)
    found = view_of(shuffled, cuts)
    assert counts(found) == counts(WHOLE)
    assert found.goodput == pytest.approx(WHOLE.goodput)
    assert found.shares == pytest.approx(WHOLE.shares)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_files_of_nodes_may_be_read_one_after_the_other(seed: int) -> None:
    chance = random.Random(seed)
    files: dict[str, list[Event]] = {}
    for event in EVENTS:
        files.setdefault(event.node, []).append(decode(encode(event)))
    merged: list[Event] = []
    while files:
        node = chance.choice(sorted(files))
        some = chance.randint(1, 50)
        merged += files[node][:some]
        files[node] = files[node][some:]
        if not files[node]:
            del files[node]
    assert counts(view_of(merged, [])) == counts(WHOLE)


@settings(max_examples=examples(100), deadline=None)
@given(
    values=st.lists(
        st.tuples(st.integers(-(10**6), 10**6), st.integers(-1000, 1000)), max_size=300
    ),
    seed=st.integers(0, 2**32),
    most=st.integers(2, 40),
)
def test_a_series_is_the_same_in_any_order_and_bounded(
    values: list[tuple[int, int]], seed: int, most: int
) -> None:
    one, other = Series(most=most), Series(most=most)
    for place, value in values:
        one.add(float(place), float(value))
    random.Random(seed).shuffle(values)
    for place, value in values:
        other.add(float(place), float(value))
    assert one.width == other.width
    assert [(at, b.count, b.least, b.most, b.total) for at, b in one.items()] == [
        (at, b.count, b.least, b.most, b.total) for at, b in other.items()
    ]
    assert len(one) <= most
    assert sum(bucket.count for _, bucket in one.items()) == len(values)
