"""A conductor acts through the parts that it is given at its start."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from doubles.memory_coordinator import MemoryCoordinator

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.conduct import Conductor
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.crew import Crew
from holdfast.elastic.agent.inbox import Inbox
from holdfast.elastic.agent.reach import Reach
from holdfast.elastic.agent.registry import Registry
from holdfast.elastic.agent.reporting import Reporter
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.membership.view import outcome_key
from holdfast.elastic.processes.node_sidecar import SidecarPlan

DEADLINE_S = 10.0


class OutOfReach(MemoryCoordinator):
    """A coordinator that does not answer writes until ``away`` is over."""

    away = True

    def compare_and_set(self, key: str, value: str, *, expected: int) -> bool:
        if self.away:
            raise CoordinatorError("no answer")
        return super().compare_and_set(key, value, expected=expected)


@contextmanager
def conducting(directory: Path, coordinator: MemoryCoordinator) -> Iterator[tuple[Conductor, Crew]]:
    config = AgentConfig(
        run="unit",
        node="a",
        domain="a",
        run_dir=str(directory),
        key_file="",
        coordinator="",
        slots={"trainer": 1},
        wanted={"trainer": 1},
        nodes=1,
        command=("python", "train.py"),
    )
    inbox, key, reporter = Inbox(), RunKey.new(), Reporter(directory, node="a")
    selector = selectors.DefaultSelector()
    crew = Crew(config, selector=selector, reporter=reporter, wake=inbox.wake)
    conductor = Conductor(
        config,
        plan=SidecarPlan(run="unit", node="a", key=key, key_file=directory / "key"),
        inbox=inbox,
        crew=crew,
        reporter=reporter,
        registry=Registry(coordinator, run="unit", lease=lambda: 1),
        reach=Reach("a", key=key, inbox=inbox),
    )
    yield conductor, crew
    conductor.sidecar.stop()
    reporter.close()
    selector.close()


def test_a_failure_of_the_job_is_written_again_until_the_coordinator_has_it(
    tmp_path: Path,
) -> None:
    coordinator = OutOfReach()
    with conducting(tmp_path, coordinator) as (conductor, crew):
        conductor.carry_on()
        crew.job_failure = "trainer/0 ended without training"
        conductor.carry_on()
        assert coordinator.get(outcome_key("unit")) is None
        coordinator.away = False
        deadline_s = time.monotonic() + DEADLINE_S
        while (entry := coordinator.get(outcome_key("unit"))) is None:
            assert time.monotonic() < deadline_s
            conductor.carry_on()
            time.sleep(0.01)
        assert crew.job_failure in entry.value


def sidecars_lost(conductor: Conductor, *, progress: int, most: int = 5) -> list[float]:
    """Lose sidecars at one step until the node gives up; return the pauses before the next."""
    conductor.progress, pauses = progress, list[float]()
    for _ in range(most):
        now_s = time.monotonic()
        conductor.sidecar_ended(pid=1)
        if conductor.unusable:
            break
        pauses.append(conductor.sidecar.due_s - now_s)
        conductor.sidecar_started()
    return pauses


def test_a_sidecar_that_ends_again_and_again_is_started_ever_later_while_nothing_moves(
    tmp_path: Path,
) -> None:
    with conducting(tmp_path, MemoryCoordinator()) as (conductor, _):
        pauses = sidecars_lost(conductor, progress=3)
        assert pauses == pytest.approx([0, 0.5, 1, 2, 4], abs=0.4)
        assert not conductor.unusable
        conductor.sidecar_failed(RuntimeError("no memory"))
        assert conductor.unusable
        assert "no memory" in conductor.failure


def test_a_node_that_protects_steps_may_lose_any_number_of_sidecars(tmp_path: Path) -> None:
    with conducting(tmp_path, MemoryCoordinator()) as (conductor, _):
        for step in range(30):
            assert len(sidecars_lost(conductor, progress=step, most=4)) == 4
        assert not conductor.unusable
        assert not conductor.failure, "the last one serves"
