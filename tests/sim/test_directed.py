"""Directed fault schedules on virtual time, each with its expected outcome."""

from __future__ import annotations

import pytest

from holdfast.elastic.events import Event, StepDone, TrainingResumed
from holdfast.elastic.membership.records import JobSpec
from holdfast.elastic.testing.simulation.faults import SimulatedFault, SimulatedFaultKind
from holdfast.elastic.testing.simulation.simulator import (
    Simulation,
    SimulationConfig,
    SimulationReport,
)

THREE = SimulationConfig(steps=60, startup_s=(0.1, 0.3), calm_s=6.0, expect_nodes=3)
SEEDS = range(5)


def fault(
    kind: SimulatedFaultKind, at_s: float, node: int = 0, lasts_s: float = 0.0
) -> SimulatedFault:
    return SimulatedFault(kind=kind, at_s=at_s, node=node, lasts_s=lasts_s)


def job(
    seed: int, *faults: SimulatedFault, config: SimulationConfig = THREE
) -> tuple[Simulation, SimulationReport]:
    simulation = Simulation(config, seed=seed, faults=faults)
    report = simulation.run()
    assert report.outcome.ok, report.outcome
    return simulation, report


def members(simulation: Simulation, number: int) -> list[str]:
    return sorted(member.node for member in simulation.generations[number].members)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("later_s", [0.01, 0.05, 0.1, 0.3, 1.0])
def test_second_and_third_failure_during_recovery(seed: int, later_s: float) -> None:
    four = SimulationConfig(
        nodes=4, wanted={"trainer": 4}, spec=JobSpec(parity=2), steps=60, startup_s=(0.1, 0.3),
        calm_s=4.0, expect_nodes=4,
    )  # fmt: skip
    _, report = job(
        seed,
        fault(SimulatedFaultKind.NODE, 1.5, 1),
        fault(SimulatedFaultKind.WORKER, 1.5 + later_s, 2),
        fault(SimulatedFaultKind.SIDECAR, 1.5 + 2 * later_s, 3),
        config=four,
    )
    assert report.restores["nothing"] == 1  # the first generation's


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("back_s", [0.01, 0.1, 0.5, 1.1])
def test_node_joins_while_the_others_recover_from_its_loss(seed: int, back_s: float) -> None:
    simulation, report = job(seed, fault(SimulatedFaultKind.NODE, 1.5, 1, lasts_s=back_s))
    assert sorted(simulation.generations[report.generations].nodes) == ["n0", "n1", "n2"]
    assert report.generations <= 4


@pytest.mark.parametrize("seed", SEEDS)
def test_a_join_undoes_no_step(seed: int) -> None:
    simulation = Simulation(
        THREE, seed=seed, faults=[fault(SimulatedFaultKind.NODE, 1.5, 1, lasts_s=0.6)]
    )
    done, undone = -1, list[int]()

    def watch(event: Event) -> None:
        nonlocal done
        if isinstance(event, TrainingResumed):
            undone.append(done - event.step)
        if isinstance(event, StepDone | TrainingResumed):
            done = event.step

    simulation.watch = watch
    assert simulation.run().outcome.ok
    lost, joined = undone[-2:]
    assert set(members(simulation, simulation.newest)) == {"n0", "n1", "n2"}
    assert lost <= 1
    assert joined == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("at_s", [2.0, 2.3, 2.5, 2.8])
def test_joining_node_is_lost_again(seed: int, at_s: float) -> None:
    _, report = job(
        seed,
        fault(SimulatedFaultKind.NODE, 1.5, 1, lasts_s=0.3),
        fault(SimulatedFaultKind.NODE, at_s, 1, lasts_s=0.4),
    )
    assert report.restores["nothing"] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_flapping_node_ends_fewer_and_fewer_generations(seed: int) -> None:
    flaps = [fault(SimulatedFaultKind.NODE, 1.0 + 2.5 * turn, 2, lasts_s=0.2) for turn in range(16)]
    config = SimulationConfig(
        steps=900, snapshot_every=5, startup_s=(0.1, 0.3), calm_s=44.0, expect_nodes=3
    )
    simulation, report = job(seed, *flaps, config=config)
    joined = [n for n in range(2, report.generations + 1) if "n2" in members(simulation, n)]
    assert 4 <= len(joined) <= 7  # of 16 returns: from the fourth on it waits 1, 2, 4 … s
    setback = simulation.generations[joined[-1]].setbacks["n2"]
    assert 4 <= setback.losses <= 6


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kind",
    [
        SimulatedFaultKind.CUT,
        SimulatedFaultKind.DEAF,
        SimulatedFaultKind.MUTE,
        SimulatedFaultKind.PAUSE,
    ],
)
def test_others_go_on_without_a_node_that_is_out_of_reach(
    seed: int, kind: SimulatedFaultKind
) -> None:
    simulation, report = job(seed, fault(kind, 1.5, 1, lasts_s=4.0))
    assert any(members(simulation, n) == ["n0", "n2"] for n in simulation.generations)
    assert report.restores["nothing"] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_job_below_its_least_size_waits_and_goes_on(seed: int) -> None:
    config = SimulationConfig(
        spec=JobSpec(min_dp=3), slots={"trainer": 1}, steps=60, startup_s=(0.1, 0.3),
        calm_s=6.0, expect_nodes=3,
    )  # fmt: skip
    simulation, report = job(
        seed, fault(SimulatedFaultKind.NODE, 1.5, 1, lasts_s=2.0), config=config
    )
    assert all(len(members(simulation, n)) == 3 for n in simulation.generations)
    assert report.generations == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_spare_takes_the_place_of_a_lost_trainer_at_once(seed: int) -> None:
    config = SimulationConfig(
        spec=JobSpec(max_dp=2), slots={"trainer": 1}, steps=60, startup_s=(0.1, 0.3), calm_s=6.0,
        expect_nodes=3,
    )  # fmt: skip
    simulation, report = job(seed, fault(SimulatedFaultKind.NODE, 2.5, 1), config=config)
    sizes = {n: len(members(simulation, n)) for n in simulation.generations}
    assert max(sizes.values()) == 2
    with_spare = [n for n in sizes if members(simulation, n) == ["n0", "n2"]]
    assert with_spare
    assert report.restores["nothing"] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_outage_of_the_coordinator_costs_no_state(seed: int) -> None:
    _, report = job(seed, fault(SimulatedFaultKind.OUTAGE, 1.5, lasts_s=3.0))
    assert report.restores["nothing"] == 1
