"""The coordinator inside the first agent: others reach it, and it outlives that agent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs import DEADLINE_S
from ports import free_ports

from holdfast.ckpt.memory.arena import sweep
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.config import AgentConfig, AgentTiming
from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.service import JOURNAL
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch.agent_start import start_agent
from holdfast.elastic.membership.records import JobOutcome
from holdfast.elastic.membership.view import encode, generation_key, node_key, outcome_key
from holdfast.elastic.processes.children import Child
from holdfast.tools.leftovers import leftovers

RUN = f"hosted-{os.getpid()}"


class Nodes:
    """Agents of one run, the first of which serves the coordinator on every address."""

    def __init__(self, directory: Path) -> None:
        (self._port,) = free_ports(1)
        self._directory, self.key = directory, RunKey.new()
        self.key.save(directory / "key.json")
        self._lifeline, self._write = os.pipe()
        self.agents: dict[str, Child] = {}
        self.output = directory / "output"

    def start(self, name: str) -> None:
        folder = self._directory / name
        folder.mkdir(exist_ok=True)
        config = AgentConfig(
            run=RUN,
            node=name,
            domain=name,
            run_dir=str(folder),
            key_file=str(self._directory / "key.json"),
            coordinator=f"tcp://127.0.0.1:{self._port}",
            coordinator_bind=f"tcp://0.0.0.0:{self._port}" if name == "n0" else "",
            slots={},
            wanted={},
            nodes=2,
            command=("true",),
            timing=AgentTiming(lease_ttl_s=30.0, self_fence_s=25.0),
        )
        self.agents[name] = start_agent(
            config, env=os.environ, stdin=self._lifeline, output=self.output
        )

    def connect(self) -> Coordinator:
        return connect(f"tcp://127.0.0.2:{self._port}", self.key, timeout_s=1.0)

    def close(self) -> None:
        os.close(self._write)
        for agent in self.agents.values():
            agent.wait(DEADLINE_S)
            agent.kill()
        os.close(self._lifeline)


@contextmanager
def nodes(directory: Path) -> Iterator[Nodes]:
    running = Nodes(directory)
    try:
        yield running
    finally:
        running.close()
        deadline_s = time.monotonic() + DEADLINE_S
        while left := leftovers(RUN):  # killed processes are about to let go of their memory
            assert time.monotonic() < deadline_s, left
            sweep()
            time.sleep(0.02)


def _await(what: Callable[[], bool], running: Nodes) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            if what():
                return
        except CoordinatorError:
            pass
        assert time.monotonic() < deadline_s, running.output.read_text()
        time.sleep(0.02)


def test_a_coordinator_outlives_the_agent_it_lives_with(tmp_path: Path) -> None:
    with nodes(tmp_path) as running:
        for name in ("n0", "n1"):
            running.start(name)
        coordinator = running.connect()
        _await(lambda: len(coordinator.range(node_key(RUN, ""))[0]) == 2, running)
        other = coordinator.get(node_key(RUN, "n1"))
        assert other is not None
        assert coordinator.compare_and_set("other/chain", "1", expected=0)
        _, revision = coordinator.range("")
        running.agents["n0"].kill()
        assert running.agents["n0"].wait(DEADLINE_S) is not None
        running.start("n0")
        _await(lambda: coordinator.get("other/chain") is not None, running)
        assert not coordinator.compare_and_set("other/chain", "1", expected=0)
        assert coordinator.put("other/chain", "2") > revision
        same = coordinator.get(node_key(RUN, "n1"))
        assert same is not None and same.lease == other.lease, "its lease was kept"
        first = node_key(RUN, "n0")
        _await(lambda: (e := coordinator.get(first)) is not None and e.revision > revision, running)
        assert coordinator.get(generation_key(RUN)) is None
        coordinator.close()


def test_a_finished_job_leaves_no_table(tmp_path: Path) -> None:
    with nodes(tmp_path) as running:
        for name in ("n0", "n1"):
            running.start(name)
        coordinator = running.connect()
        _await(lambda: len(coordinator.range(node_key(RUN, ""))[0]) == 2, running)
        assert (tmp_path / "n0" / JOURNAL).exists()
        outcome = encode(JobOutcome(ok=True, message="done"))
        assert coordinator.compare_and_set(outcome_key(RUN), outcome, expected=0)
        for name in ("n1", "n0"):  # the host is the last to leave
            assert running.agents[name].wait(DEADLINE_S) == 0, running.output.read_text()
        assert not (tmp_path / "n0" / JOURNAL).exists()
        coordinator.close()


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with nodes(tmp_path) as running:
        running.start("n0")
        coordinator = running.connect()
        _await(lambda: coordinator.get(node_key(RUN, "n0")) is not None, running)
        coordinator.close()
        first = running.agents.pop("n0")
        running.start("n0")
        second = running.agents["n0"]
        assert second.wait(DEADLINE_S) == 1
        assert "another process serves the coordinator of this run" in running.output.read_text()
        running.agents["first"] = first
