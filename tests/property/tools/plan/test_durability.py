"""The formulas of losses agree with nodes, racks and feeds that are drawn."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.parity.groups import form_groups
from holdfast.tools.plan.bursts import group_ways, loss_at_once, ring_ways
from holdfast.tools.plan.job import PlannedJob
from holdfast.tools.plan.losses import failure_rates

DAY_S = 86400.0


def job(**changes: Any) -> PlannedJob:
    values: dict[str, Any] = {
        "state_bytes": 10**13,
        "nodes": 10_000,
        "step_s": 20.0,
        "node_mtbf_s": 264 * DAY_S,
    }
    return PlannedJob(**(values | changes))


# -- nodes that fail at once -----------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(
    nodes=st.integers(2, 14),
    parity=st.sampled_from((0, 1, 2, 3, "replicate")),
    group=st.integers(2, 8),
    failures=st.integers(0, 6),
)
def test_the_chance_is_the_share_of_fatal_sets(
    nodes: int, parity: Any, group: int, failures: int
) -> None:
    lost = 1 if parity == "replicate" else parity
    planned = job(nodes=max(nodes, lost + 1), parity=parity, group=max(group, lost + 1))
    failures = min(failures, planned.nodes)
    names = [f"{number:07}" for number in range(planned.nodes)]
    groups, _ = form_groups(
        dict.fromkeys(names, ""),
        parity=lost,
        size=planned.group,
        columns=int(parity == "replicate"),
    )

    def is_fatal(failed: set[str]) -> bool:
        if parity == "replicate":
            return any(
                len(ring) > 1 and node in failed and ring[at - 1] in failed
                for ring in groups
                for at, node in enumerate(ring)
            )
        return any(len(failed.intersection(each)) > parity for each in groups)

    sets = [{*chosen} for chosen in itertools.combinations(names, failures)]
    assert loss_at_once(planned, failures) == pytest.approx(sum(map(is_fatal, sets)) / len(sets))


def test_a_hundred_of_ten_thousand_nodes_cost_steps_as_often_as_drawn_ones_do() -> None:
    drawn, rounds = random.Random(8), 4000
    for parity in (1, 2):
        planned = job(parity=parity)
        fatal = sum(
            max(Counter(node // 8 for node in drawn.sample(range(10_000), 100)).values()) > parity
            for _ in range(rounds)
        )
        expected = loss_at_once(planned, 100)
        error = math.sqrt(expected * (1 - expected) / rounds)
        assert abs(fatal / rounds - expected) <= 5 * error


def test_more_failures_than_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="5 of 4 nodes cannot fail"):
        loss_at_once(job(nodes=4), 5)


def test_the_ways_of_a_group_and_of_a_ring() -> None:
    assert group_ways(8, 2) == [1, 8, 28]
    assert [ring_ways(size) for size in (1, 2, 3, 4, 5)] == [
        [1],
        [1, 2],
        [1, 3],
        [1, 4, 2],
        [1, 5, 5],
    ]


# -- years of failures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "window_s", "years"),
    [
        ({"parity": 1}, 600.0, 30),
        ({"parity": 1, "racks": 1250, "feeds": 16}, 300.0, 30),
        ({"parity": 2, "racks": 1250, "feeds": 8, "node_mtbf_s": 13 * DAY_S}, 1800.0, 2),
        ({"parity": 1, "nodes": 1000, "racks": 2}, 600.0, 150),
    ],
    ids=["alone", "racks and feeds", "two rows of parity", "racks that no memory survives"],
)
def test_memory_loses_steps_as_often_as_in_years_that_are_lived_through(
    changes: dict[str, Any], window_s: float, years: int
) -> None:
    for kind in ("rack", "feed"):
        if f"{kind}s" in changes:
            changes = {**changes, f"{kind}_mtbf_s": 5 * 365 * DAY_S}
    planned = job(**changes)
    expected = failure_rates(planned, window_s=window_s).lost * years * 365 * DAY_S
    losses = lived(planned, window_s=window_s, seconds=years * 365 * DAY_S)
    assert losses > 50, "too few to say anything"
    assert abs(losses - expected) <= 5 * math.sqrt(expected) + 0.05 * expected


def lived(planned: PlannedJob, *, window_s: float, seconds: float) -> int:
    """Return how often more nodes of a group are gone at once than its parity makes good.

    A group makes all of its losses good together, at a random time after the newest.
    """
    nodes, racks, feeds = planned.nodes, planned.racks, planned.feeds
    rack_of = [node * racks // nodes if racks else node for node in range(nodes)]
    feed_of = [rack * feeds // (racks or nodes) for rack in rack_of] if feeds else []
    labels = {
        f"{node:05}": "/".join(
            [
                *([f"f{feed_of[node]}"] if feeds else []),
                *([f"r{rack_of[node]:05}"] if racks else []),
            ]
        )
        for node in range(nodes)
    }
    groups, _ = form_groups(labels, parity=planned.lost_with_memory)
    group_of = {int(name): number for number, group in enumerate(groups) for name in group}
    causes = [[node] for node in range(nodes)]
    weights = [1 / planned.node_mtbf_s] * nodes
    for units, count, mtbf_s in (
        (rack_of, racks, planned.rack_mtbf_s),
        (feed_of, feeds, planned.feed_mtbf_s),
    ):
        together: list[list[int]] = [[] for _ in range(count)]
        for node, unit in enumerate(units if count else ()):
            together[unit].append(node)
        causes += together
        weights += [1 / (mtbf_s or math.inf)] * count
    drawn, now_s, losses = random.Random(8), 0.0, 0
    rate, cumulated = sum(weights), list(itertools.accumulate(weights))
    lost: dict[int, set[int]] = {}
    good_s = dict.fromkeys(range(len(groups)), 0.0)
    while (now_s := now_s + drawn.expovariate(rate)) < seconds:
        (failed,) = drawn.choices(causes, cum_weights=cumulated)
        hit = {group_of[node] for node in failed}
        for node in failed:
            group = group_of[node]
            if now_s > good_s[group]:
                lost[group] = set()
            lost[group].add(node)
            good_s[group] = now_s + drawn.expovariate(1 / window_s)
        if any(len(lost[group]) > planned.lost_with_memory for group in hit):
            losses += 1
            for group in hit:
                lost[group].clear()
    return losses
