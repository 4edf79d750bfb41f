"""Nodes that reach the coordinator but not each other, on virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.elastic.events import Event, TrainingResumed
from holdfast.elastic.membership.records import JobSpec
from holdfast.elastic.testing.simulation.faults import SimulatedFault, SimulatedFaultKind
from holdfast.elastic.testing.simulation.simulator import (
    Simulation,
    SimulationConfig,
    SimulationReport,
)

AT_S = 1.5
FOUND_S = 6.0
"""From a cut until others train on: a stall, two tries, a report of reachable nodes, a re-form."""
MENDED_S = 20.0
"""From its end until all train: who is left out is asked every ten seconds at the latest."""

JOB = SimulationConfig(
    nodes=4,
    wanted={"trainer": 4},
    slots={"trainer": 1},
    spec=JobSpec(parity=1),
    steps=140,
    step_s=(0.2, 0.3),
    startup_s=(0.1, 0.3),
    calm_s=30.0,
    expect_nodes=4,
)
SEEDS = range(3)
BOTH, OUT, IN = 0.0, 0.001, 0.002
"""Values of a fault's ``pick`` that select the direction."""


def apart(
    a: int, b: int, *, at_s: float = AT_S, lasts_s: float = 0.0, pick: float = BOTH
) -> SimulatedFault:
    return SimulatedFault(
        kind=SimulatedFaultKind.APART, at_s=at_s, node=a, other=b, lasts_s=lasts_s, pick=pick
    )  # fmt: skip


class Story:
    """The history of a job: its generations' members, and the time at which each resumed."""

    def __init__(self, seed: int, *faults: SimulatedFault, config: SimulationConfig = JOB) -> None:
        self.resumed: dict[int, float] = {}
        self.simulation = Simulation(config, seed=seed, faults=faults)
        self.simulation.watch = self._watch
        self.report: SimulationReport = self.simulation.run()
        assert self.report.outcome.ok, self.report.outcome

    def _watch(self, event: Event) -> None:
        if isinstance(event, TrainingResumed):
            self.resumed.setdefault(event.generation, self.simulation.now_s)

    def members(self, number: int) -> str:
        homes = {member.node for member in self.simulation.generations[number].members}
        return "".join(sorted(home.removeprefix("n") for home in homes))

    def trained(self) -> dict[float, str]:
        """Return who trained from when on, the starts left out."""
        return {at_s: self.members(n) for n, at_s in self.resumed.items() if at_s > AT_S}

    def first(self, members: str) -> float:
        return next(at_s for at_s, who in self.trained().items() if who == members)

    def reasons(self) -> str:
        return "\n".join(record.reason for record in self.simulation.generations.values())


@pytest.mark.parametrize("pick", [BOTH, OUT, IN], ids=["both ways", "one way", "the other way"])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_of_two_that_do_not_reach_each_other_is_left_out_until_they_do(
    seed: int, pick: float
) -> None:
    story = Story(seed, apart(1, 3, lasts_s=10.0, pick=pick))
    assert story.first("012") - AT_S < FOUND_S
    assert story.first("0123") - (AT_S + 10.0) < MENDED_S
    assert "n3 left out: it and n1 do not reach each other" in story.reasons()
    assert story.report.restores["nothing"] == 1, "the first generation's"


@pytest.mark.parametrize("seed", SEEDS)
def test_whom_nobody_reaches_is_left_out_and_not_those_who_miss_him(seed: int) -> None:
    story = Story(seed, *(apart(0, other, lasts_s=8.0) for other in (1, 2, 3)))
    assert next(iter(story.trained().values())) == "123"
    assert story.first("0123") - (AT_S + 8.0) < MENDED_S


@pytest.mark.parametrize("seed", SEEDS)
def test_two_pairs_apart_leave_two_nodes(seed: int) -> None:
    four = replace(JOB, spec=JobSpec(parity=2))
    story = Story(seed, apart(0, 2, lasts_s=8.0), apart(1, 3, lasts_s=8.0), config=four)
    assert "01" in story.trained().values()
    assert story.first("0123") - (AT_S + 8.0) < MENDED_S
    assert story.report.restores["nothing"] == 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("later_s", [0.02, 0.1, 0.3])
def test_a_cut_while_a_group_forms_is_found_as_well(seed: int, later_s: float) -> None:
    killed = SimulatedFault(kind=SimulatedFaultKind.WORKER, at_s=AT_S, node=2)
    story = Story(seed, killed, apart(0, 1, at_s=AT_S + later_s))
    alone = [at_s for at_s, who in story.trained().items() if "0" in who and "1" not in who]
    assert alone[0] - AT_S < 2 * FOUND_S


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spare_is_left_out_before_a_node_that_trains(seed: int) -> None:
    config = replace(JOB, spec=JobSpec(parity=1, max_dp=3))
    calm = Story(seed, config=replace(config, steps=20))
    first = calm.members(calm.simulation.newest)
    (spare,) = set("0123") - set(first)
    story = Story(seed, apart(int(spare), int(first[0]), lasts_s=8.0), config=config)
    assert set(story.trained().values()) == {first}
    groups = [set(record.nodes) for record in story.simulation.generations.values()]
    assert {f"n{name}" for name in first} in groups


@pytest.mark.parametrize("seed", SEEDS)
def test_a_link_that_comes_and_goes_ends_fewer_and_fewer_generations(seed: int) -> None:
    config = replace(JOB, nodes=3, wanted={"trainer": 3}, steps=400, calm_s=110.0, expect_nodes=3)
    flaps = [apart(1, 2, at_s=AT_S + 8.0 * turn, lasts_s=2.5) for turn in range(12)]
    story = Story(seed, *flaps, config=config)
    joined = [n for n in story.resumed if story.members(n) == "012"]
    setback = story.simulation.generations[joined[-1]].setbacks["n2"]
    assert setback.losses > 3
    assert 4 <= len(joined) <= 9, (
        "of 13 times that it could: from the fourth on it waits 1, 2, 4 … s"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_with_too_few_left_the_job_waits_and_goes_on_when_it_is_mended(seed: int) -> None:
    config = replace(JOB, spec=JobSpec(parity=1, min_dp=4))
    story = Story(seed, apart(0, 1, lasts_s=6.0), config=config)
    assert set(story.trained().values()) == {"0123"}
    assert story.first("0123") - (AT_S + 6.0) < MENDED_S
