"""Committed snapshots survive the death of any process of a machine; nothing outlives the job."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from jobs import DEADLINE_S, REMEMBERING, Job, job

from holdfast.ckpt.memory.arena import arena_path, hold

VICTIMS = (
    "agent",
    "sidecar",
    "worker sidecar agent",
    *(
        pytest.param(pair, marks=pytest.mark.exhaustive)
        for pair in ("agent sidecar", "worker sidecar", "worker agent")
    ),
)


def kill(running: Job, node: str, *victims: str) -> None:
    """SIGKILL processes of a node at one blow."""
    found = running.launcher.processes()[node]
    pids = {
        "agent": [found.agent],
        "sidecar": [found.sidecar],
        "worker": list(found.workers.values()),
    }
    for victim in victims:
        for pid in pids[victim]:
            os.kill(pid, signal.SIGKILL)


def protected(running: Job, step: int) -> int:
    """Wait until a worker saw ``step`` protected; return the newest one seen."""
    running.await_event(lambda e: e["kind"] == "step" and e["protected"] >= step)
    return max(int(event["protected"]) for event in running.events("step"))


@pytest.mark.parametrize("victims", VICTIMS)
def test_the_memory_of_a_node_survives_its_processes(tmp_path: Path, victims: str) -> None:
    with job(tmp_path, script=REMEMBERING) as running:
        reached = protected(running, 3)
        kill(running, "n0", *victims.split())
        resumed = running.generation(2)
        assert resumed["step"] >= reached
        last = [event for event in running.events("proposed") if event["restore_how"] != "none"]
        assert last and {event["restore_how"] for event in last} == {"memory"}


def test_a_node_whose_agent_died_comes_back_into_the_group(tmp_path: Path) -> None:
    with job(tmp_path, script=REMEMBERING, nodes=3, per_node=1) as running:
        reached = protected(running, 3)
        kill(running, "n1", "agent")
        lost = running.await_event(lambda e: e["kind"] == "node_exited")
        running.world_of(3, after=running.history.index(lost))
        assert running.generation(2)["step"] >= reached
        assert running.events("node_exited")[0]["memory_kept"]


def test_every_agent_at_once_costs_no_step(tmp_path: Path) -> None:
    with job(tmp_path, script=REMEMBERING, nodes=2, per_node=1) as running:
        reached = protected(running, 3)
        for node in ("n0", "n1"):
            kill(running, node, "worker", "sidecar", "agent")
        assert running.generation(2)["step"] >= reached


def test_a_lost_machine_takes_its_memory_along_and_is_rebuilt_from_parity(tmp_path: Path) -> None:
    with job(tmp_path, script=REMEMBERING, nodes=3, per_node=1) as running:
        reached = protected(running, 3)
        pids = running.launcher.lose_machine("n1")
        assert len(pids) == 3
        assert not arena_path(running.launcher.run, "n1").exists()
        running.world_of(2)
        assert running.generation(2)["step"] >= reached
        assert running.events("proposed")[1]["restore_how"] == "parity"
        assert not running.events("node_exited")[0]["memory_kept"]
        assert running.launcher.lose_machine("n1") == []


@pytest.mark.exhaustive
def test_a_machine_that_comes_back_joins_the_group_with_nothing_in_its_memory(
    tmp_path: Path,
) -> None:
    with job(tmp_path, script=REMEMBERING, nodes=3, per_node=1) as running:
        reached = protected(running, 3)
        assert running.launcher.lose_machine("n1")
        running.world_of(2)
        running.launcher.return_machine("n1")
        after = len(running.history)
        again = running.world_of(3, after=after)
        assert again["restore_step"] >= reached
        started = [e for e in running.events("sidecar_started") if e["node"] == "n1"]
        assert len(started) == 2
        running.launcher.return_machine("n1")  # it is there
        later = running.await_event(
            lambda e: e["kind"] == "step" and e["generation"] >= again["generation"], after=after
        )
        running.await_step(later["step"] + 10)
        assert len(running.events("node_exited")) == 1


def test_a_lost_machine_that_the_job_needs_is_replaced(tmp_path: Path) -> None:
    with job(tmp_path, script=REMEMBERING) as running:
        protected(running, 3)
        assert running.launcher.lose_machine("n0")
        assert running.generation(2)["step"] == 0, "nothing is left to restore from"


def test_memory_that_a_stranger_holds_too_is_left_to_it(tmp_path: Path) -> None:
    with job(tmp_path, script=REMEMBERING) as running:
        protected(running, 1)
        directory = arena_path(running.launcher.run, "n0")
        fd = hold(directory)
        running.launcher.stop("enough")
        running.finish()
        assert directory.exists()
        os.close(fd)
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


@pytest.mark.exhaustive
def test_an_agent_that_dies_again_and_again_ends_the_job(tmp_path: Path) -> None:
    with job(tmp_path, script=REMEMBERING, node_restarts=1) as running:
        for start in (1, 2):
            running.generation(start)
            deadline_s = time.monotonic() + DEADLINE_S
            while not (found := running.launcher.processes().get("n0")):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            os.kill(found.agent, signal.SIGKILL)
        outcome = running.finish()
        assert "every node is lost: n0 (killed by SIGKILL)" in outcome.message


def test_an_agent_may_die_any_number_of_times_while_the_job_gets_on(tmp_path: Path) -> None:
    with job(tmp_path, script=REMEMBERING, node_restarts=1) as running:
        reached = -1
        for start in (1, 2, 3):
            running.generation(start)
            deadline_s = time.monotonic() + DEADLINE_S
            while not (found := running.launcher.processes().get("n0")) or (
                found.progress <= reached
            ):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            reached = found.progress
            os.kill(found.agent, signal.SIGKILL)
        running.generation(4)
