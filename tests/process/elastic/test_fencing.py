"""A node paused for longer than its lease: no two generations ever act at once at any sink."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked_scripts import ran
from jobs import DEADLINE_S, Event, Job
from tree import HELPERS

from holdfast.ckpt.memory.arena import arena_path, sweep
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.reporting import NodeProcesses, read_processes
from holdfast.elastic.coordinator.embedded import EmbeddedCoordinator, EmbeddedServer
from holdfast.elastic.launch.agent_start import start_agent
from holdfast.elastic.launch.config import LOCAL_TIMING, python_command
from holdfast.elastic.membership.view import outcome_key
from holdfast.elastic.processes.children import Child
from holdfast.tools.leftovers import leftovers

SCRIPT = HELPERS / "tiny_training.py"
RECORDING = HELPERS / "recording"
NODES = ("a", "b", "c")
STEPS = 60
TIMING = msgspec.structs.replace(LOCAL_TIMING, lease_ttl_s=4.0, self_fence_s=2.0)


class Nodes(Job):
    """Agents without a launcher: only the coordinator notices that one of them is paused."""

    def __init__(self, folder: Path) -> None:
        self.run, self.run_dir, self.acts_dir = f"fencing-{os.getpid()}", folder, folder / "acts"
        self.result, self.key = folder / "result.json", RunKey.new()
        self.go_on = folder / "go"
        (folder / "logs").mkdir()
        self.acts_dir.mkdir()
        self.key.save(folder / "key.json")
        self.server = EmbeddedServer(self.key)
        self.coordinator = EmbeddedCoordinator(self.server.address, self.key)
        self._read, self._write = os.pipe()
        super().__init__(self)  # type: ignore[arg-type]  # of the launcher, only the folder
        self.agents = {node: self._start(node) for node in NODES}

    def _start(self, node: str) -> Child:
        flags = ["--result", str(self.result), "--steps", str(STEPS), "--pace", "0.25"]
        flags += ["--until", str(self.go_on)]
        flags += ["--checkpoint", str(self.run_dir / "store"), "--checkpoint-every", "5"]
        config = AgentConfig(
            run=self.run,
            node=node,
            domain=node,
            run_dir=str(self.run_dir),
            key_file=str(self.run_dir / "key.json"),
            coordinator=self.server.address,
            slots={"trainer": 1},
            wanted={"trainer": len(NODES)},
            nodes=len(NODES),
            command=python_command(SCRIPT, flags),
            capture_output=True,
            timing=TIMING,
        )
        env = {**os.environ, "PYTHONPATH": str(RECORDING)}
        env["HOLDFAST_TEST_RECORD"] = str(self.acts_dir)
        return start_agent(config, env=env, stdin=self._read)

    def found(self, node: str) -> NodeProcesses:
        found = read_processes(self.run_dir, node)
        assert found is not None
        return found

    def await_outcome(self) -> None:
        deadline_s = time.monotonic() + 2 * DEADLINE_S
        while (entry := self.coordinator.get(outcome_key(self.run))) is None:
            assert time.monotonic() < deadline_s, "the job is not over"
            time.sleep(0.05)
        assert json.loads(entry.value)["ok"], entry.value

    def close(self) -> None:
        os.close(self._write)
        for agent in self.agents.values():
            agent.signal(signal.SIGCONT)
            if agent.wait(DEADLINE_S) is None:
                agent.kill()
                agent.wait(DEADLINE_S)
        os.close(self._read)
        self.coordinator.close()
        self.server.close()
        for node in NODES:
            sweep(exactly=arena_path(self.run, node).name)
        assert leftovers(self.run, timeout_s=DEADLINE_S) == []

    def acts(self) -> list[Event]:
        """Return what every sink accepted, by time."""
        lines = [
            json.loads(line)
            for path in self.acts_dir.glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
        return sorted(lines, key=lambda act: act["t"])


@contextmanager
def nodes(folder: Path) -> Iterator[Nodes]:
    running = Nodes(folder)
    try:
        yield running
    finally:
        running.close()


def overlaps(acts: list[Event]) -> list[tuple[Event, Event]]:
    """Return the pairs of acts in which an older generation acted after a newer one."""
    newest: Event | None = None
    found = []
    for act in acts:
        if newest is not None and act["generation"] < newest["generation"]:
            found.append((newest, act))
        elif newest is None or act["generation"] > newest["generation"]:
            newest = act
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    result = tmp_path_factory.mktemp("calm") / "calm.json"
    flags = ["--result", str(result), "--steps", str(STEPS)]
    ran([sys.executable, SCRIPT, *flags], check=True)
    return json.loads(result.read_text())["hash"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(False, id="the agent", marks=pytest.mark.exhaustive),
        pytest.param(True, id="the whole node"),
    ],
)
def test_a_paused_node_wakes_fenced_and_harms_nothing(
    tmp_path: Path, undisturbed: Any, whole: bool
) -> None:
    with nodes(tmp_path) as running:
        running.await_step(3)
        b = running.found("b")
        pids = [b.agent, b.sidecar, *b.workers.values()] if whole else [b.agent]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        running.generation(2)
        running.go_on.touch()
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        running.await_event(lambda e: e["kind"] == "detected" and e["what"] == "lease_lost")
        running.await_outcome()
    acts = running.acts()
    assert {act["sink"] for act in acts} == {"arena", "peer", "weights", "store", "step"}
    judged = [act for act in acts if act["sink"] != "store"]
    if whole:  # its own sidecar finishes what lay in its queues; nobody reads that before it adopts
        judged = [act for act in judged if act["node"] != "b" or act["sink"] == "step"]
    assert overlaps(judged) == []
    assert json.loads(running.result.read_text())["hash"] == undisturbed


def test_acts_that_overlap_are_found() -> None:
    def act(t: float, generation: int) -> Event:
        return {"t": t, "generation": generation}

    assert overlaps([act(0, 1), act(1, 1), act(2, 2)]) == []
    assert overlaps([act(0, 1), act(1, 2), act(2, 1)]) == [(act(1, 2), act(2, 1))]
