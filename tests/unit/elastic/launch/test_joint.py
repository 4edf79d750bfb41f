"""One of several launchers: its nodes, its number, and its waits for the coordinator."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from doubles.memory_coordinator import MemoryCoordinator

from holdfast.elastic.coordinator.base import Entry
from holdfast.elastic.coordinator.service import LauncherRecord, launcher_key
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.launch.joint import JointConfig, JointLauncher, SharedJobRecord
from holdfast.elastic.membership.view import decode, encode
from holdfast.elastic.rendezvous.link import CoordinatorPlace

RECORD = SharedJobRecord(run="r", machines=2, wanted={}, return_s=600.0)


@pytest.mark.parametrize(
    ("names", "domains"),
    [(("", ""), ["machine3", "machine3"]), (("rack-1", "rack-2"), ["rack-1", "rack-2"])],
)
def test_a_nodes_domain_is_the_machine_unless_it_is_named(
    tmp_path: Path, names: tuple[str, str], domains: list[str]
) -> None:
    nodes = [NodeSpec(name=f"node{i}", domain=each, slots={}) for i, each in enumerate(names)]
    launcher = JointLauncher(
        LaunchConfig(command=("true",), nodes=tuple(nodes), wanted={}, run_dir=tmp_path),
        JointConfig(
            place=CoordinatorPlace.parse("localhost:1"),
            key_file=tmp_path / "key.json",
            host="127.0.0.1",
        ),
    )
    launcher._take(SharedJobRecord(run="r", machines=2, wanted={}), 3)
    assert [node.name for node in launcher.config.nodes] == ["node3-0", "node3-1"]
    assert [node.domain for node in launcher.config.nodes] == domains


class Unreachable(MemoryCoordinator):
    """A coordinator that does not answer while it is ``away``."""

    away = False

    def get(self, key: str) -> Entry | None:
        if self.away:
            raise CoordinatorError("no answer")
        return super().get(key)


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[JointLauncher, Unreachable]:
    """Return a launcher that has joined a job, and its coordinator."""
    node = NodeSpec(name="node0", slots={})
    launcher = JointLauncher(
        LaunchConfig(command=("true",), nodes=(node,), wanted={}, run_dir=tmp_path),
        JointConfig(
            place=CoordinatorPlace.parse("localhost:1"), key_file=tmp_path / "key.json", joins=True
        ),
    )
    there = Unreachable()
    there.put("jobs/job/record", encode(RECORD))
    launcher._coordinator = there
    monkeypatch.setattr(launcher, "_claim", lambda numbers: 1)
    launcher._take(RECORD, 1)
    return launcher, there


def test_a_launcher_waits_for_the_coordinator_as_long_as_its_return_may_take(
    joined: tuple[JointLauncher, Unreachable],
) -> None:
    launcher, coordinator = joined
    coordinator.away = True
    launcher._heard_s -= RECORD.return_s - 5
    assert launcher._read_outcome() is None
    assert launcher._stop_reason is None
    launcher._heard_s -= 5
    assert launcher._read_outcome() is None
    assert launcher._stop_reason == "the coordinator has been silent for 600 s: no answer"


def test_a_launcher_that_has_heard_the_coordinator_waits_anew(
    joined: tuple[JointLauncher, Unreachable],
) -> None:
    launcher, coordinator = joined
    launcher._heard_s -= RECORD.return_s + 5
    assert launcher._read_outcome() is None
    coordinator.away = True
    assert launcher._read_outcome() is None
    assert launcher._stop_reason is None


@pytest.mark.parametrize("run", [None, "another"])
def test_a_launcher_leaves_a_coordinator_that_does_not_know_its_job(
    joined: tuple[JointLauncher, Unreachable], run: str | None
) -> None:
    launcher, coordinator = joined
    coordinator.delete("jobs/job/record")
    if run:
        record = msgspec.structs.replace(RECORD, run=run)
        coordinator.put("jobs/job/record", encode(record))
    assert launcher._read_outcome() is None
    assert "was started anew and does not know this job" in (launcher._stop_reason or "")


def test_a_launcher_that_returns_takes_its_number_again(
    joined: tuple[JointLauncher, Unreachable],
) -> None:
    launcher, coordinator = joined
    signed = LauncherRecord(pid=1, nodes=("node7",), number=7)
    coordinator.put(launcher_key(launcher.run), encode(signed))
    coordinator.put("jobs/job/launchers/7", "{}", lease=coordinator.grant(1000.0))
    assert launcher._return()
    assert launcher._joint.number == 7
    assert coordinator.get("jobs/job/launchers/7") is None
    entry = coordinator.get(launcher_key(launcher.run))
    assert entry is not None
    assert decode(entry.key, entry.value, LauncherRecord) == msgspec.structs.replace(
        signed, pid=os.getpid()
    )
