"""A job of months on virtual time: nothing that its agents and coordinator hold grows.

Machines, agents, sidecars and workers are lost and return all the time, thousands of times. The
decisions, the book of snapshots and the coordinator's table are those of production. The number of
steps passes 10^6, where it gets a seventh digit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import fmean
from typing import Final

import msgspec
import pytest
from doubles.sizes import deep_bytes

from holdfast.ckpt.sidecar.core import book
from holdfast.elastic.coordinator.memory import KeyValueTable
from holdfast.elastic.membership import view as views
from holdfast.elastic.membership.records import JobOutcome, JobSpec
from holdfast.elastic.planning import plan
from holdfast.elastic.testing.simulation import registration, simulator
from holdfast.elastic.testing.simulation.faults import SimulatedFault, SimulatedFaultKind
from holdfast.elastic.testing.simulation.simulator import Simulation, SimulationConfig

MONTH_S: Final = 30 * 86_400.0
NODES: Final = 3
KINDS: Final = (
    SimulatedFaultKind.WORKER,
    SimulatedFaultKind.WORKER,
    SimulatedFaultKind.HANG,
    SimulatedFaultKind.NODE,
    SimulatedFaultKind.SIDECAR,
    SimulatedFaultKind.PAUSE,
    SimulatedFaultKind.CRASH,
    SimulatedFaultKind.CUT,
    SimulatedFaultKind.SPLIT,
    SimulatedFaultKind.OUTAGE,
)
ENDING: Final = (SimulatedFaultKind.NODE, SimulatedFaultKind.SIDECAR, SimulatedFaultKind.CRASH)
OLDEST: Final = "n0"
"""The node whose agent and sidecar live as long as the job.

Of the others one at a time is struck by the faults of `ENDING`, so that the memory is never lost
and the chain of restored steps goes back to the beginning.
"""

EVERY_S: Final = 220.0
"""The time between two faults."""

KEYS: Final = NODES + 2
"""The records of the nodes, the newest generation and the seating."""

SIZES: Final = ("record_bytes", "journal_bytes", "history", "agent_bytes")
SLACK: Final = 1.1
"""For jobs in the middle of a recovery, and for longer numbers."""

ENOUGH: Final = "it has lived long enough"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContents:
    """The contents of a job at one moment: keys and bytes at the coordinator, bytes in an agent."""

    generation: int
    keys: int
    record_bytes: int
    leases: int
    journal_bytes: int
    history: int
    agent_bytes: int
    shared: int

    @classmethod
    def by(cls, job: Simulation) -> JobContents:
        """Return what a simulated job holds now; of the agents the oldest."""
        each = job.agents[OLDEST]
        entries, _ = job.table.range("")
        state = [
            *(each.view, each.part, each._probing, each.crew.workers, each._inventory),
            *(each._registration._published, each._missed),
            *(each.calls._waiting, each.calls._names),
            *(each.sidecar.book, each.sidecar._blocks, each.sidecar._rows),
        ]
        return cls(
            generation=job.newest,
            keys=len(entries),
            record_bytes=sum(len(entry.value) for entry in entries),
            leases=len(job.table._leases),
            journal_bytes=len(msgspec.json.encode(job.table.changes())),
            history=len(job.table._history),
            agent_bytes=deep_bytes(state),
            shared=views._shared_entries.cache_info().currsize,
        )


def faults(seed: int, *, count: int) -> Iterator[SimulatedFault]:
    """Yield a fault of a drawn kind every `EVERY_S` or so; all of them end soon."""
    draw = Random(f"a month of {seed}")
    for number in range(count):
        kind = draw.choice(KINDS)
        least, most = (1 + number // 50 % 2,) * 2 if kind in ENDING else (0, NODES - 1)
        yield SimulatedFault(
            kind=kind,
            at_s=(number + draw.uniform(0.2, 0.8)) * EVERY_S,
            node=draw.randint(least, most),
            lasts_s=draw.uniform(0.2, EVERY_S / 8),
            pick=draw.random(),
        )


def lived(
    seed: int, *, count: int, first_step: int, samples: int
) -> tuple[Simulation, list[JobContents]]:
    """Return a job after ``count`` faults, and what it held at ``samples`` moments."""
    end_s = count * EVERY_S
    config = SimulationConfig(
        nodes=NODES,
        spec=JobSpec(parity=1, keep=2),
        steps=10**9,
        step_s=(EVERY_S / 13, EVERY_S / 9),
        startup_s=(0.2, 1.0),
        calm_s=end_s,
        expect_nodes=NODES,
    )
    job = Simulation(config, seed=seed, faults=[*faults(seed, count=count)])
    job.training.start_at(first_step)
    contents: list[JobContents] = []

    def end() -> None:
        job.outcome = JobOutcome(ok=False, message=ENOUGH)

    for number in range(1, samples + 1):
        moment = number * count // samples  # the end of a pause between two faults
        job.schedule.after(moment * EVERY_S, lambda: contents.append(JobContents.by(job)))
    job.schedule.after(end_s + 1.0, end)
    report = job.run()
    assert report.outcome.message == ENOUGH
    return job, contents


def check_flat(contents: list[JobContents]) -> None:
    """Compare the means of the last and the second quarter: a job that has just begun is small."""
    quarter = len(contents) // 4
    early, late = contents[quarter : 2 * quarter], contents[3 * quarter :]
    for name in SIZES:
        before, after = (fmean(getattr(each, name) for each in part) for part in (early, late))
        assert after <= before * SLACK, f"{name} grew from {before:,.0f} to {after:,.0f}"
    assert max(each.keys for each in late) <= KEYS
    assert max(each.shared for each in contents) <= 8 * NODES  # of the newest generation
    assert max(each.leases for each in late) <= 2 * NODES  # of a lost node until it ends


@pytest.fixture
def reached_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the bounds of what is kept so small that a job of hours reaches them all."""
    monkeypatch.setattr(book, "_GONE_KEPT", 16)
    monkeypatch.setattr(plan, "MAX_TIMELINE", 8)
    monkeypatch.setattr(simulator, "KeyValueTable", partial(KeyValueTable, max_history_events=100))


@pytest.fixture(autouse=True)
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let leases be renewed every 15 s, so that a month has few events of no interest."""
    for name, seconds in {"LEASE_TTL_S": 60.0, "SELF_FENCE_S": 42.0, "KEEP_ALIVE_S": 15.0}.items():
        monkeypatch.setattr(registration, name, seconds)


@pytest.mark.usefixtures("reached_soon")
def test_a_job_of_half_a_day_holds_no_more_than_after_two_hours() -> None:
    job, contents = lived(seed=3, count=200, first_step=999_900, samples=100)
    assert job.newest > 150
    assert len(job.training.history) > 1_000_000
    assert job.training.restores["nothing"] == 1, "at its beginning"
    check_flat(contents)


@pytest.mark.exhaustive
def test_a_job_of_a_month_with_ten_thousand_generations_holds_no_more_than_in_its_second_week() -> (
    None
):
    count = 12_000
    assert count * EVERY_S > MONTH_S
    job, contents = lived(seed=3, count=count, first_step=950_000, samples=400)
    assert job.newest > 10_000
    assert len(job.training.history) > 1_000_000
    check_flat(contents)
