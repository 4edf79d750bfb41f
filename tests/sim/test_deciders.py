"""Jobs in which few agents decide and the others follow, on virtual time.

Small jobs count as large ones here (``most_watchers=0``), so that thousands of schedules of faults
meet a decider that is lost, stopped or cut off.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from doubles.drawing import draw_config

from holdfast.elastic.decisions.deciding import MOST_WATCHERS
from holdfast.elastic.membership.records import JobSpec
from holdfast.elastic.testing.simulation.faults import SimulatedFault, SimulatedFaultKind
from holdfast.elastic.testing.simulation.simulator import (
    Simulation,
    SimulationConfig,
    SimulationReport,
)
from holdfast.elastic.testing.simulation.training import InvariantError

PARTS = 50
RUNS = 5_000
IN_CI = 1

FIVE = SimulationConfig(
    nodes=5,
    wanted={"trainer": 5},
    slots={"trainer": 2},
    spec=JobSpec(parity=2),
    steps=60,
    startup_s=(0.1, 0.3),
    calm_s=6.0,
    expect_nodes=5,
    most_watchers=0,
    deciders=2,
)


def simulate(seed: int) -> SimulationReport:
    config = replace(draw_config(seed), most_watchers=0, deciders=1 + seed % 2)
    try:
        return Simulation(config, seed=seed).run()
    except InvariantError as error:
        pytest.fail(f"seed {seed}: {error}", pytrace=False)


@pytest.mark.parametrize(
    "part",
    [*range(IN_CI), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(IN_CI, PARTS))],
)
def test_no_schedule_breaks_an_invariant_where_few_decide(part: int) -> None:
    reports = [simulate(seed) for seed in range(part, RUNS, PARTS)]
    assert all(report.outcome.ok for report in reports), [r.outcome for r in reports]
    restored = sum((Counter(report.restores) for report in reports), Counter[str]())
    assert min(restored[how] for how in ("memory", "rebuilt", "nothing")) > 5


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [SimulatedFaultKind.NODE, SimulatedFaultKind.PAUSE])
@pytest.mark.parametrize("lasts_s", [0.3, 2.5])
def test_job_survives_all_of_its_deciders_at_once(
    seed: int, kind: SimulatedFaultKind, lasts_s: float
) -> None:
    simulation = Simulation(FIVE, seed=seed, faults=())

    def strike() -> None:
        for decider in simulation.view().deciders.values():
            fault = SimulatedFault(kind=kind, at_s=0.0, node=int(decider.node[1:]), lasts_s=lasts_s)
            assert simulation.injection.strike(fault)

    simulation.schedule.after(2.0, strike)
    report = simulation.run()
    assert report.outcome.ok
    assert report.faults == {kind: 2}
    assert report.restores["nothing"] == 1, "the first generation alone"


@pytest.mark.parametrize("seed", range(3))
def test_three_deciders_at_once_are_no_danger(seed: int) -> None:
    """All of three nodes decide; each change has one next generation."""
    config = replace(FIVE, nodes=3, wanted={"trainer": 3}, deciders=3, expect_nodes=3)
    faults = [
        SimulatedFault(kind=SimulatedFaultKind.WORKER, at_s=at_s, node=node)
        for node, at_s in enumerate((1.5, 2.5, 3.5))
    ]
    report = Simulation(config, seed=seed, faults=faults).run()
    assert report.outcome.ok
    assert report.generations <= 7, "at most two for each of the faults"


@pytest.mark.exhaustive
def test_followers_look_a_few_times_for_each_change_however_many_they_are() -> None:
    looks = {}
    for nodes in (MOST_WATCHERS + 8, 3 * MOST_WATCHERS):
        config = SimulationConfig(
            nodes=nodes,
            wanted={"trainer": nodes},
            slots={"trainer": 1},
            steps=40,
            snapshot_every=1000,
            startup_s=(0.2, 0.4),
            calm_s=4.0,
            expect_nodes=nodes,
        )
        faults = [SimulatedFault(kind=SimulatedFaultKind.WORKER, at_s=2.5, node=nodes // 2)]
        simulation = Simulation(config, seed=1, faults=faults)
        report = simulation.run()
        assert report.outcome.ok
        assert report.faults == {SimulatedFaultKind.WORKER: 1}
        followers = sum(agent.follows for agent in simulation.agents.values())
        assert followers >= nodes - 4, "three decide, and perhaps one looks after its worker"
        looks[nodes] = simulation.looks["follower"] / nodes
    few, many = looks.values()
    assert many < 1.5 * few
