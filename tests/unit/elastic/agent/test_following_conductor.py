"""A conductor in a large job: it follows, takes a free place, and then watches and tells."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles import fakes
from doubles.memory_coordinator import MemoryCoordinator

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent import conduct
from holdfast.elastic.agent.conduct import Conductor
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.crew import Crew
from holdfast.elastic.agent.inbox import Inbox
from holdfast.elastic.agent.reach import Reach
from holdfast.elastic.agent.registry import Registry
from holdfast.elastic.agent.reporting import Reporter
from holdfast.elastic.membership.records import Bulletin, Decider, NodeRecord
from holdfast.elastic.membership.view import (
    bulletin_key,
    decider_key,
    decode,
    encode,
    generation_key,
    job_prefix,
    node_key,
    run_prefix,
)
from holdfast.elastic.processes.node_sidecar import SidecarPlan

RUN = "unit"
DEADLINE_S = 10.0


@pytest.fixture
def coordinator() -> MemoryCoordinator:
    return MemoryCoordinator()


@pytest.fixture
def conductor(tmp_path: Path, coordinator: MemoryCoordinator) -> Iterator[Conductor]:
    config = AgentConfig(
        run=RUN,
        node="a",
        domain="a",
        run_dir=str(tmp_path),
        key_file="",
        coordinator="",
        slots={"trainer": 1},
        wanted={"trainer": 40},
        nodes=40,
        command=("python", "train.py"),
    )
    inbox, key, reporter = Inbox(), RunKey.new(), Reporter(tmp_path, node="a")
    selector = selectors.DefaultSelector()
    crew = Crew(config, selector=selector, reporter=reporter, wake=inbox.wake)
    lease = coordinator.grant(3600.0)
    conductor = Conductor(
        config,
        plan=SidecarPlan(run=RUN, node="a", key=key, key_file=tmp_path / "key"),
        inbox=inbox,
        crew=crew,
        reporter=reporter,
        registry=Registry(coordinator, run=RUN, lease=lambda: lease),
        reach=Reach("a", key=key, inbox=inbox),
    )
    yield conductor
    conductor.sidecar.stop()
    reporter.close()
    selector.close()


def look(conductor: Conductor, coordinator: MemoryCoordinator) -> None:
    """Show the conductor the keys that it asks for, and let it act."""
    whole = conductor.watches
    prefix = run_prefix(RUN) if whole else job_prefix(RUN)
    conductor.look(coordinator.range(prefix)[0], whole=whole)
    conductor.publish()
    conductor.carry_on()


def test_agent_of_a_large_job_takes_a_free_place_and_then_watches_and_tells(
    conductor: Conductor, coordinator: MemoryCoordinator
) -> None:
    assert not conductor.watches
    deadline_s = time.monotonic() + DEADLINE_S
    while not conductor.watches:
        look(conductor, coordinator)
        assert time.monotonic() < deadline_s
    taken = [coordinator.get(decider_key(RUN, place)) for place in range(3)]
    (entry,) = [found for found in taken if found is not None]
    assert decode(entry.key, entry.value, Decider).node == "a"
    while coordinator.get(bulletin_key(RUN)) is None:
        look(conductor, coordinator)
        assert time.monotonic() < deadline_s
    conductor.withdraw()
    assert all(coordinator.get(decider_key(RUN, place)) is None for place in range(3))
    assert coordinator.get(node_key(RUN, "a")) is None


def followed_by_others(coordinator: MemoryCoordinator) -> None:
    """Make three other agents the deciders."""
    for place, name in enumerate("xyz"):
        decider = Decider(node=name, incarnation=f"{name}#1")
        coordinator.put(decider_key(RUN, place), encode(decider))


def test_follower_fences_what_a_bulletin_ends(
    conductor: Conductor, coordinator: MemoryCoordinator
) -> None:
    followed_by_others(coordinator)
    nodes = [fakes.node(name, fakes.worker(f"trainer/{name}")) for name in "axyz"]
    record = fakes.generation(1, nodes, ranks=[(each.node, each.workers[0]) for each in nodes])
    coordinator.put(generation_key(RUN), encode(record))
    look(conductor, coordinator)
    assert set(conductor.view.nodes) == set("axyz"), "stand-ins, and its own"
    fenced: list[int] = []
    conductor.sidecar.fence = fenced.append  # type: ignore[method-assign]
    coordinator.put(bulletin_key(RUN), encode(Bulletin(number=1, over=1, reason="y was lost")))
    look(conductor, coordinator)
    assert fenced == [1]


def test_follower_publishes_again_what_the_coordinator_has_lost(
    conductor: Conductor, coordinator: MemoryCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conduct, "_OWN_LOOK_S", 0.0)
    followed_by_others(coordinator)
    look(conductor, coordinator)
    key = node_key(RUN, "a")
    coordinator.delete(key)
    look(conductor, coordinator)
    conductor.publish()
    entry = coordinator.get(key)
    assert entry is not None
    late = decode(key, entry.value, NodeRecord)
    coordinator.put(key, encode(late).replace('"fenced":0', '"fenced":7'))
    look(conductor, coordinator)
    conductor.publish()
    entry = coordinator.get(key)
    assert entry is not None
    assert decode(key, entry.value, NodeRecord) == late, "an older write that came late is undone"
