"""The formulas of a plan agree with runs that are lived through, and move the right way."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from exploring import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planned_runs import LivedRun

from holdfast.tools.plan.forecast import Intervals, best, forecast, goodputs
from holdfast.tools.plan.intervals import daly, least, taken, young
from holdfast.tools.plan.job import PlannedJob
from holdfast.tools.plan.losses import LossChain

GIB = 1 << 30


def job(**changes: Any) -> PlannedJob:
    values: dict[str, Any] = {
        "state_bytes": 64 * GIB,
        "nodes": 16,
        "step_s": 2.0,
        "node_mtbf_s": 16 * 500.0,
        "group": 8,
        "snapshot_cost_s": 0.2,
        "checkpoint_cost_s": 3.0,
        "protect_s": 1.5,
        "recovery_s": 4.0,
        "restart_s": 60.0,
        "network": 4.0 * GIB,
        "disk": 0.5 * GIB,
    }
    return PlannedJob(**(values | changes))


def lived(planned: PlannedJob, intervals: Intervals, *, seed: int, steps: int) -> LivedRun:
    run = LivedRun(job=planned, intervals=intervals, random=random.Random(seed))
    run.live(steps)
    return run


@pytest.mark.parametrize("parity", [0, 1, 2, "replicate"])
@settings(max_examples=examples(6), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    every=st.integers(1, 12),
    fold=st.integers(2, 12),
    mtbf_s=st.floats(3000, 20000),
)
def test_goodput_and_losses_are_those_of_runs_that_are_lived_through(
    parity: Any, seed: int, every: int, fold: int, mtbf_s: float
) -> None:
    planned = job(parity=parity, node_mtbf_s=mtbf_s)
    intervals = Intervals(snapshot=every, checkpoint=every * fold)
    expected = forecast(planned, intervals)
    assume(expected.goodput > 0.4)
    steps = 60_000 // (every * fold) * every * fold
    run = lived(planned, intervals, seed=seed, steps=steps)
    hard = expected.rates.hard * run.now_s
    assert abs(run.hard - hard) <= 5 * math.sqrt(hard) + 0.2 * hard + 4
    goodput = steps * planned.step_s / run.now_s
    hard_cost_s = planned.reload_s + expected.lost_work_s[1]
    chance = (run.soft**0.5 * planned.return_s + (run.hard + 1) ** 0.5 * hard_cost_s) / run.now_s
    assert abs(goodput - expected.goodput) <= 0.012 + 5 * chance + 0.06 * (1 - expected.goodput)


@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    useful_s=st.floats(1, 500),
    cost_s=st.floats(0, 50),
    return_s=st.floats(0, 100),
)
def test_the_time_of_an_interval_is_that_of_drawn_failures(
    seed: int, useful_s: float, cost_s: float, return_s: float
) -> None:
    drawn, rate, rounds = random.Random(seed), 1 / 400.0, 4000
    total_s = squares = 0.0
    for _ in range(rounds):
        spent_s = 0.0
        while (fails_s := drawn.expovariate(rate)) < useful_s + cost_s:
            spent_s += fails_s
            while (again_s := drawn.expovariate(rate)) < return_s:
                spent_s += again_s
            spent_s += return_s
        spent_s += useful_s + cost_s
        total_s += spent_s
        squares += spent_s**2
    mean_s = total_s / rounds
    error_s = math.sqrt(max(squares / rounds - mean_s**2, 0.0) / rounds)
    expected = taken(useful_s, cost_s=cost_s, rate=rate, return_s=return_s)
    assert abs(mean_s - expected) <= 5 * error_s + 1e-9


@settings(max_examples=examples(15), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(3, 9),
    parity=st.integers(1, 2),
    repair=st.floats(0.5, 20.0),
    rack=st.none() | st.tuples(st.integers(1, 2), st.floats(0.01, 0.3)),
)
def test_a_chain_is_absorbed_as_often_as_one_that_is_drawn(
    seed: int, nodes: int, parity: int, repair: float, rack: tuple[int, float] | None
) -> None:
    racks = (rack,) if rack else ()
    chain = LossChain(
        nodes=nodes,
        parity=parity,
        node_rate=0.2,
        repair_rate=repair,
        partners=nodes - 1,
        domains=racks,
    )
    assume(chain.loss_rate() > 2e-3)
    drawn, time, losses = random.Random(seed), 0.0, 0
    while losses < 600:
        lost = 0
        while lost <= parity:
            failing = (nodes - lost) * 0.2
            rates = [failing, *(rate for _, rate in racks), repair if lost else 0.0]
            time += drawn.expovariate(sum(rates))
            kind = drawn.choices(range(len(rates)), rates)[0]
            if kind == 0:
                lost += 1
            elif kind <= len(racks):
                lost += racks[kind - 1][0]
            else:
                lost = 0
        losses += 1
    assert chain.loss_rate() == pytest.approx(losses / time, rel=5 / math.sqrt(losses))


@settings(max_examples=examples(40), deadline=None)
@given(
    mtbf_s=st.floats(86400 * 20, 86400 * 2000),
    nodes=st.integers(4, 200),
    parity=st.sampled_from((0, 1, 2, "replicate")),
    cost_s=st.floats(0.01, 5),
)
def test_what_is_better_makes_the_job_better(
    mtbf_s: float, nodes: int, parity: Any, cost_s: float
) -> None:
    base = job(
        nodes=nodes,
        parity=parity,
        node_mtbf_s=mtbf_s,
        snapshot_cost_s=cost_s,
        step_s=10.0,
        outage_mtbf_s=86400.0 * 30,
        worker_mtbf_s=86400.0 * 400,
    )
    found = best(base)
    for change in (
        {"node_mtbf_s": mtbf_s * 2},
        {"snapshot_cost_s": cost_s / 2},
        {"recovery_s": 1.0},
        {"restart_s": 1.0},
        {"outage_mtbf_s": 86400.0 * 60},
    ):
        assert best(replace(base, **change)).goodput >= found.goodput - 1e-6
    if parity in (0, 1):
        more = replace(base, parity=parity + 1)
        assert more.lost_with_memory == parity + 1
        here = Intervals(snapshot=found.intervals.snapshot, checkpoint=found.intervals.checkpoint)
        assert forecast(more, here).rates.lost < found.rates.lost
        assert forecast(more, here).memory.total >= found.memory.total


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), mtbf_s=st.floats(86400 * 5, 86400 * 500), cost_s=st.floats(0.01, 20))
def test_no_other_intervals_are_better(data: st.DataObject, mtbf_s: float, cost_s: float) -> None:
    planned = job(node_mtbf_s=mtbf_s, snapshot_cost_s=cost_s, outage_mtbf_s=86400.0 * 10, nodes=64)
    found = best(planned)
    low = math.ceil(planned.protection_s / planned.step_s)
    every = data.draw(st.integers(low, 400))
    count = data.draw(st.integers(1, 400)) * every
    assume(count * planned.step_s >= planned.persist_s)
    assert goodputs(planned, every, [count])[0] <= found.goodput + 1e-6


@given(cost_s=st.floats(0.01, 100), mean_s=st.floats(1e4, 1e7))
def test_daly_and_young_are_near_the_best_of_the_model(cost_s: float, mean_s: float) -> None:
    assume(cost_s < mean_s / 50)

    def slowdown(useful_s: float) -> float:
        return taken(useful_s, cost_s=cost_s, rate=1 / mean_s, return_s=0.0) / useful_s

    top = min(slowdown(daly(cost_s, 1 / mean_s) * factor / 100.0) for factor in range(30, 300, 2))
    assert slowdown(daly(cost_s, 1 / mean_s)) <= top * (1 + 1e-3)
    assert slowdown(young(cost_s, 1 / mean_s)) <= top * (1 + 1e-2)


@given(low=st.integers(0, 50), width=st.integers(0, 3000), at=st.floats(-10, 3100))
def test_the_least_of_a_valley_is_found(low: int, width: int, at: float) -> None:
    found = least(lambda n: abs(n - at), low=low, high=low + width)
    assert abs(found - at) == min(abs(n - at) for n in range(low, low + width + 1))
