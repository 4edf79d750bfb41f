"""Jobs of real processes that count as large: three agents decide, the others follow."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import DEADLINE_S, Job, hurt, job

from holdfast.elastic.coordinator.embedded import EmbeddedCoordinator
from holdfast.elastic.decisions.deciding import PLACES
from holdfast.elastic.membership.records import Decider, NodeRecord
from holdfast.elastic.membership.view import decider_key, decode, node_key

LONG = ("--steps", "1000000")
NODES = 5


def deciders(running: Job) -> dict[int, Decider]:
    """Return the deciders by place, as soon as every place is taken."""
    launcher = running.launcher
    coordinator = EmbeddedCoordinator(launcher.coordinator_address, launcher.key)
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline_s:
            entries = [coordinator.get(decider_key(launcher.run, n)) for n in range(PLACES)]
            found = {
                place: decode(entry.key, entry.value, Decider)
                for place, entry in enumerate(entries)
                if entry is not None
            }
            if len(found) == PLACES:
                return found
            time.sleep(0.02)
    finally:
        coordinator.close()
    raise AssertionError("a place of a decider stays free")


def seat_on(running: Job, node: str) -> str:
    """Return the seat of a node's trainer."""
    launcher = running.launcher
    coordinator = EmbeddedCoordinator(launcher.coordinator_address, launcher.key)
    try:
        entry = coordinator.get(node_key(launcher.run, node))
    finally:
        coordinator.close()
    assert entry is not None
    return decode(entry.key, entry.value, NodeRecord).workers[0].seat


def test_follower_loses_its_worker_and_the_deciders_plan(tmp_path: Path) -> None:
    nodes = PLACES + 1
    with job(tmp_path, *LONG, nodes=nodes, per_node=1, most_watchers=1) as running:
        running.await_step(5)
        decide = {decider.node for decider in deciders(running).values()}
        (follower,) = {f"n{number}" for number in range(nodes)} - decide
        hurt(running.worker(seat_on(running, follower)))
        running.world_of(nodes, generation=2)
        assert {each["node"] for each in running.events("proposed")} <= decide


@pytest.mark.exhaustive
@pytest.mark.slow
def test_decider_loses_its_agent_and_another_takes_its_place(tmp_path: Path) -> None:
    with job(tmp_path, *LONG, nodes=NODES, per_node=1, most_watchers=1) as running:
        running.await_step(5)
        first = deciders(running)[0]
        hurt(running.launcher.processes()[first.node].agent)
        running.world_of(NODES, generation=2)
        assert deciders(running)[0] != first
        (lost,) = [e for e in running.events("detected") if e["what"] == "node_lost"]
        assert lost["victim"] == first.node


@pytest.mark.exhaustive
@pytest.mark.slow
def test_job_goes_on_without_all_of_its_first_deciders(tmp_path: Path) -> None:
    with job(tmp_path, *LONG, nodes=NODES, per_node=1, most_watchers=1) as running:
        running.await_step(5)
        before = deciders(running)
        for decider in before.values():
            hurt(running.launcher.processes()[decider.node].agent)
        running.world_of(NODES, generation=2)
        after = deciders(running)
        assert not {each.incarnation for each in after.values()} & {
            each.incarnation for each in before.values()
        }


@pytest.mark.exhaustive
@pytest.mark.slow
def test_followers_watch_when_all_ranks_wait_for_each_other(tmp_path: Path) -> None:
    timing = {"min_hang_s": 1.5, "first_hang_s": 1.5}
    options: dict[str, Any] = {"nodes": NODES, "per_node": 1, "most_watchers": 1, "timing": timing}
    with job(tmp_path, "--hang", "meet", *LONG, **options) as running:
        resumed = running.generation(2)
        seen = [e["what"] for e in running.events("detected") if e["time_s"] < resumed["time_s"]]
        assert seen == ["stall"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_node_of_a_follower_leaves_on_notice(tmp_path: Path) -> None:
    with job(tmp_path, *LONG, nodes=NODES, per_node=1, most_watchers=1) as running:
        running.await_step(5)
        decide = {decider.node for decider in deciders(running).values()}
        follower = min({f"n{number}" for number in range(NODES)} - decide)
        hurt(running.launcher.processes()[follower].agent, signal.SIGTERM)
        running.world_of(NODES - 1)
        leaving = running.await_event(lambda e: e["kind"] == "leaving")
        assert leaving["node"] == follower
