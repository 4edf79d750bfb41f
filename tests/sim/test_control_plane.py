"""The control plane on virtual time: random faults, second failures, partitions, joins.

A failing seed prints the command that replays it. More schedules:
``python -m pytest tests/sim/test_control_plane.py --sim-runs 10000``.
"""

from __future__ import annotations

import logging
import time

import pytest
from doubles import fakes

from holdfast.elastic.decisions import agree
from holdfast.elastic.membership.readiness import ready_trainers
from holdfast.elastic.membership.records import JobSpec
from holdfast.elastic.planning import plan as planning
from holdfast.elastic.testing.simulation.simulator import (
    Simulation,
    SimulationConfig,
    SimulationReport,
)
from holdfast.elastic.testing.simulation.training import InvariantError

_log = logging.getLogger(__name__)

SCENARIOS = {
    "three_nodes": SimulationConfig(),
    "demo": SimulationConfig(
        wanted={"trainer": 2, "rollout": 2},
        slots={"trainer": 1, "rollout": 1},
        expect_nodes=3,
    ),
    "fixed_size": SimulationConfig(
        nodes=4, wanted={"trainer": 4}, spec=JobSpec(dp=4), steps=80, expect_nodes=4
    ),
    "two_parity": SimulationConfig(
        nodes=6,
        wanted={"trainer": 8},
        spec=JobSpec(parity=2, min_dp=2, keep=3),
        steps=60,
        faults=12,
    ),
    "storm": SimulationConfig(nodes=5, wanted={"trainer": 5}, faults=40, steps=60),
}
DEFAULT_RUNS = {"three_nodes": 60, "demo": 30, "fixed_size": 20, "two_parity": 10, "storm": 15}


def simulate(config: SimulationConfig, seed: int, *, scenario: str) -> SimulationReport:
    try:
        return Simulation(config, seed=seed).run()
    except InvariantError as error:
        replay = f"{__file__} -k {scenario} --sim-seed {seed}"
        pytest.fail(f"{error}\n\nreplay with: python -m pytest {replay}", pytrace=False)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_job_survives_any_schedule_of_faults(scenario: str, request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("--sim-seed", default=None)
    runs = request.config.getoption("--sim-runs", default=None) or DEFAULT_RUNS[scenario]
    seeds = range(runs) if seed is None else [seed]
    reports = [simulate(SCENARIOS[scenario], seed, scenario=scenario) for seed in seeds]
    assert all(report.outcome.ok for report in reports), [r.outcome for r in reports]
    if seed is None:  # the schedules are worth their time
        for how in ("memory", "rebuilt", "nothing"):
            assert any(report.restores[how] for report in reports), how
        assert max(report.generations for report in reports) > 5


def test_equal_seeds_give_equal_runs() -> None:
    runs = [Simulation(SCENARIOS["storm"], seed=5) for _ in range(2)]
    reports = [run.run() for run in runs]
    assert reports[0] == reports[1]
    assert list(runs[0].schedule.trace) == list(runs[1].schedule.trace)


def test_undisturbed_job_needs_one_generation() -> None:
    config = SimulationConfig(faults=0, expect_nodes=3, startup_s=(0.5, 1.5))
    report = Simulation(config, seed=1).run()
    assert report.outcome.ok
    assert report.generations == 1


def test_seat_that_always_fails_ends_the_job_with_its_reason() -> None:
    config = SimulationConfig(faults=0, max_attempts=3)
    simulation = Simulation(config, seed=1)

    def crash() -> None:
        for agent in simulation.agents.values():
            if "trainer/0" in agent.crew.workers:
                agent.kill_worker("trainer/0", "exit status 1")
        simulation.schedule.after(0.05, crash)

    simulation.training.protected = lambda *_: None  # type: ignore[method-assign]
    simulation.schedule.after(0.3, crash)
    report = simulation.run()
    assert not report.outcome.ok
    assert "trainer/0 failed 3 times in a row" in report.outcome.message
    assert "exit status 1" in report.outcome.message


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (agree, "_unfenced", lambda view, *, group: []),
        (planning, "on_timeline", lambda generation, *, step, timeline: True),
        (agree, "faults", lambda view: []),
    ],
    ids=["does not wait for fences", "restores rolled-back futures", "sees no faults"],
)
def test_simulation_catches_a_broken_decision(
    module: object, name: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(InvariantError):
        for seed in range(300):
            Simulation(SCENARIOS["three_nodes"], seed=seed).run()


def test_a_hundred_nodes_survive_faults() -> None:
    config = SimulationConfig(
        nodes=100,
        wanted={"trainer": 100},
        slots={"trainer": 1},
        spec=JobSpec(parity=1, keep=1),
        steps=4,
        snapshot_every=1000,
        startup_s=(0.2, 1.0),
        notice_s=(0.01, 0.1),
        faults=8,
        calm_s=4.0,
        expect_nodes=100,
    )
    report = Simulation(config, seed=3).run()
    assert report.outcome.ok
    assert report.generations >= 2


def test_ten_thousand_nodes_are_planned_in_two_looks() -> None:
    workers = [fakes.worker(f"trainer/{i}", ready_after=3) for i in range(10_000)]
    names = [f"n{i:05}" for i in range(10_000)]
    nodes = [fakes.node(n, w, fenced=3) for n, w in zip(names, workers, strict=True)]
    old = fakes.generation(3, nodes, ranks=list(zip(names, workers, strict=True)), parity=2)
    view = fakes.view(*nodes[:-2], generation=old, wanted={"trainer": 10_000})
    start_s = time.perf_counter()
    seen = agree.observe(view, agree.FirstSeen(), now_s=0.0)
    decision, reason = agree.decide(view, seen, node=names[0], now_s=0.0)
    assert decision == agree.WaitForFences(until_s=0.0), reason
    seen = agree.observe(view, seen, now_s=0.0)
    decision, reason = agree.decide(view, seen, node=names[0], now_s=0.0)
    _log.info("10,000 nodes decided and planned in %.2f s", time.perf_counter() - start_s)
    assert isinstance(decision, agree.Propose)
    assert len(decision.record.members) == len(ready_trainers(view)) == 9_998
    assert "node n09998 was lost; node n09999 was lost" in reason
