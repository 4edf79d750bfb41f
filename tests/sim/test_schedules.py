"""Thousands of small jobs under random faults of nodes, agents, network and coordinator.

Every seed is another job and another schedule. A schedule that breaks an invariant is replayed,
shrunk to the relevant faults, and printed with the command that repeats it. ``--sim-runs`` is the
number of seeds (default 10,000, split over the parts below). CI runs 2,000 of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import pytest
from doubles.drawing import draw_config

from holdfast.elastic.testing.simulation.faults import SimulatedFault, SimulatedFaultKind, shrink
from holdfast.elastic.testing.simulation.simulator import Simulation, SimulationReport, faults_of
from holdfast.elastic.testing.simulation.training import InvariantError

DEFAULT_RUNS = 10_000
PARTS = 50
"""So that several processes share the work, and none comes near a test's time limit."""

IN_CI = 10
"""Parts that run each time; the others are for releases."""


def broken(seed: int, faults: Sequence[SimulatedFault]) -> str:
    """Return which invariant a schedule breaks, with the end of the trace; empty for none."""
    try:
        Simulation(draw_config(seed), seed=seed, faults=faults).run()
    except InvariantError as error:
        return str(error)
    return ""


def simulate(seed: int) -> SimulationReport:
    try:
        return Simulation(draw_config(seed), seed=seed).run()
    except InvariantError:
        pytest.fail(explanation(seed), pytrace=False)


def explanation(seed: int) -> str:
    """Return the smallest schedule found that breaks the job of ``seed``, its trace, and how."""
    whole = faults_of(draw_config(seed), seed=seed)
    fewest = shrink(whole, fails=lambda faults: bool(broken(seed, faults)))
    schedule = "\n".join(f"    {fault}" for fault in fewest)
    return (
        f"{broken(seed, fewest)}\n\n{len(fewest)} of {len(whole)} faults suffice:\n{schedule}\n\n"
        f"replay with: python -m pytest {__file__} --sim-seed {seed}"
    )


@pytest.mark.parametrize(
    "part",
    [*range(IN_CI), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(IN_CI, PARTS))],
)
def test_no_schedule_breaks_an_invariant(part: int, request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("--sim-seed", default=None)
    runs = request.config.getoption("--sim-runs", default=None) or DEFAULT_RUNS
    seeds = range(part, runs, PARTS) if seed is None else [seed][part:]
    reports = [simulate(seed) for seed in seeds]
    assert all(report.outcome.ok for report in reports), [r.outcome for r in reports]
    if len(reports) >= DEFAULT_RUNS // PARTS:  # the schedules are worth their time
        struck = sum((Counter(report.faults) for report in reports), Counter[str]())
        assert set(struck) == set(SimulatedFaultKind)
        restored = sum((Counter(report.restores) for report in reports), Counter[str]())
        assert min(restored[how] for how in ("memory", "rebuilt", "nothing")) > 20
        assert max(report.generations for report in reports) > 3


def test_schedule_is_the_same_for_the_same_seed() -> None:
    runs = [Simulation(draw_config(4), seed=4) for _ in range(2)]
    assert runs[0].run() == runs[1].run()
    assert list(runs[0].schedule.trace) == list(runs[1].schedule.trace)


def test_failing_schedule_is_shrunk_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "holdfast.elastic.planning.plan.on_timeline", lambda generation, *, step, timeline: True
    )
    seed = next(
        seed for seed in range(2000) if broken(seed, faults_of(draw_config(seed), seed=seed))
    )
    whole = faults_of(draw_config(seed), seed=seed)
    fewest = shrink(whole, fails=lambda faults: bool(broken(seed, faults)))
    assert broken(seed, fewest)
    assert all(not broken(seed, [*fewest[:i], *fewest[i + 1 :]]) for i in range(len(fewest)))
    assert f"--sim-seed {seed}" in explanation(seed)


def test_shrinking_leaves_exactly_the_faults_that_fail_together() -> None:
    def schedule(*numbers: int) -> tuple[SimulatedFault, ...]:
        return tuple(
            SimulatedFault(kind=SimulatedFaultKind.CUT, at_s=n / 7, node=n) for n in numbers
        )

    def fails(faults: Sequence[SimulatedFault]) -> bool:
        return {3, 11} <= {fault.node for fault in faults}

    fewest = shrink(schedule(*range(16)), fails=fails)
    assert [fault.node for fault in fewest] == [3, 11]
    assert [fault.at_s for fault in fewest] == [0.0, 2.0]
    assert shrink(schedule(1, 2), fails=lambda faults: True) == ()


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = chain.from_iterable(faults_of(draw_config(seed), seed=seed) for seed in range(200))
    assert {fault.kind for fault in drawn} == set(SimulatedFaultKind)
