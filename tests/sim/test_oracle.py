"""The oracle itself: its judgement of what sidecars can deliver of a restore point."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from holdfast.ckpt.memory.records import BlockSource, RestorePoint
from holdfast.elastic.events import Event, StepDone
from holdfast.elastic.membership.records import JobSpec
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.testing.simulation.faults import SimulatedFault, SimulatedFaultKind
from holdfast.elastic.testing.simulation.reading import unreadable
from holdfast.elastic.testing.simulation.sidecar import SimulatedSidecar
from holdfast.elastic.testing.simulation.simulator import Simulation, SimulationConfig

QUIET = SimulationConfig(
    nodes=4, wanted={"trainer": 4}, steps=20, startup_s=(0.1, 0.2), faults=0, expect_nodes=4,
    spec=JobSpec(parity=1),
)  # fmt: skip


def ended() -> tuple[JobView, dict[str, SimulatedSidecar], RestorePoint]:
    """Return a job that has ended, all inventories taken, and its newest restore point."""
    simulation = Simulation(QUIET, seed=1)
    assert simulation.run().outcome.ok
    sidecars = {name: agent.sidecar for name, agent in simulation.agents.items()}
    for sidecar in sidecars.values():
        sidecar.inventory()
    world = simulation.generations[simulation.newest].snapshots
    step = max(step for _, step in sidecars["n0"].book.snapshots)
    sources = tuple(BlockSource(rank=r, node=n) for r, n in enumerate(world.rank_nodes))
    return simulation.view(), sidecars, RestorePoint(world=world, step=step, sources=sources)


def from_parity(point: RestorePoint, rank: int, node: str) -> RestorePoint:
    sources = list(point.sources)
    sources[rank] = BlockSource(rank=rank, node=node, rebuilt=True)
    return msgspec.structs.replace(point, sources=tuple(sources))


def without(view: JobView, *names: str) -> JobView:
    return replace(view, nodes={n: each for n, each in view.nodes.items() if n not in names})


def test_what_lies_where_the_point_says_can_be_read() -> None:
    view, sidecars, point = ended()
    assert unreadable(point, view=view, sidecars=sidecars) == ""


def test_block_of_another_node_is_missed() -> None:
    view, sidecars, point = ended()
    other = point.sources[1].node
    wrong = (BlockSource(rank=0, node=other), *point.sources[1:])
    message = unreadable(
        msgspec.structs.replace(point, sources=wrong), view=view, sidecars=sidecars
    )
    assert message == f"the block of rank 0 is asked of {other}, which does not have it"


def test_as_many_nodes_as_the_parity_may_be_gone() -> None:
    view, sidecars, point = ended()
    gone, also, third, _ = (source.node for source in point.sources)
    one = without(view, gone)
    assert "which is gone" in unreadable(point, view=one, sidecars=sidecars)
    assert unreadable(from_parity(point, 0, third), view=one, sidecars=sidecars) == ""
    two = without(view, gone, also)
    both = from_parity(from_parity(point, 0, third), 1, third)
    assert "fragments of stripe" in unreadable(both, view=two, sidecars=sidecars)


def test_point_without_all_ranks_is_none() -> None:
    view, sidecars, point = ended()
    fewer = msgspec.structs.replace(point, sources=point.sources[:-1])
    assert "has sources for ranks [0, 1, 2]" in unreadable(fewer, view=view, sidecars=sidecars)


def test_worker_that_hangs_for_a_moment_goes_on_where_it_stood() -> None:
    for lasts_s, generations in ((0.5, {1}), (4.0, {2, 3})):
        hang = SimulatedFault(kind=SimulatedFaultKind.HANG, at_s=1.0, lasts_s=lasts_s)
        report = Simulation(replace(QUIET, steps=60), seed=2, faults=[hang]).run()
        assert report.outcome.ok
        assert report.generations in generations


def test_whoever_watches_sees_every_step() -> None:
    simulation = Simulation(QUIET, seed=3)
    steps: list[int] = []

    def watch(event: Event) -> None:
        if isinstance(event, StepDone):
            steps.append(event.step)

    simulation.watch = watch
    simulation.run()
    assert steps == list(range(1, 21))


@pytest.mark.parametrize("at_s", [0.05, 0.3, 0.31, 0.33, 0.36, 0.4])
def test_worker_that_hangs_as_its_generation_begins_holds_nobody_up_for_good(at_s: float) -> None:
    hang = SimulatedFault(kind=SimulatedFaultKind.HANG, at_s=at_s, lasts_s=0.6)
    report = Simulation(QUIET, seed=4, faults=[hang]).run()
    assert report.outcome.ok
    assert report.ended_s < 10
