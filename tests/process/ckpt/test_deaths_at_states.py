"""Deaths at every state of a slot: the job goes on, and no protected step is lost.

The sidecars are told where to stop. The first one to reach that point stops, and then a process of
its node is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from jobs import REMEMBERING, Job, job
from sidecar_group import wait_until
from stop_points import stopping_at

NODES = ("n0", "n1", "n2")
STATES = ("acquire.after", "seal.after", "commit.before", "commit.after", "release.after")
"""In each state of a slot: writing, sealed by its rank, by all, committed, and empty again."""

OTHERS = ("acquire.before", "seal.before", "create.made", "discard.after")
GROW = 12_000
"""Bytes a step: slots become too small now and then, others are made, and they are discarded."""

STEP_S = 0.1
"""The job does nothing but wait, most of the time: it takes few steps meanwhile."""


def stop_somewhere(running: Job, order: Path, point: str) -> str:
    """Have one sidecar stop at ``point``; return its node."""
    fresh = order.with_suffix(".new")
    fresh.write_text(point)
    fresh.rename(order)
    wait_until(lambda: not order.exists(), f"a slot gets to {point}")
    found: list[str] = []

    def is_stopped() -> bool:
        found[:] = [
            node
            for node, processes in running.launcher.processes().items()
            if processes.sidecar and state_of(processes.sidecar) == "T"
        ]
        return bool(found)

    wait_until(is_stopped, "a sidecar stops")
    return found[0]


def state_of(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def end(running: Job, node: str, victim: str) -> None:
    """SIGKILL the victim; who else was stopped goes on."""
    found = running.launcher.processes()[node]
    if victim == "machine":
        assert running.launcher.lose_machine(node)
        running.launcher.return_machine(node)
        return
    victims = {
        "worker": [*found.workers.values()],
        "agent": [found.agent],
        "node": [found.agent, found.sidecar, *found.workers.values()],
    }
    for pid in victims[victim]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if victim == "worker":
        os.kill(found.sidecar, signal.SIGCONT)


def whole_again(running: Job, *, after: int, least: int) -> int:
    """Wait until all take part and are protected; return the newest protected step."""
    lost = running.await_event(lambda e: e["kind"] == "proposed", after=after)
    world = running.world_of(len(NODES), after=running.history.index(lost))
    for proposed in running.history[after:]:
        if proposed["kind"] == "proposed":
            assert (proposed["restore_step"] or 0) >= least, "what was protected is restored"
    event = running.await_event(
        lambda e: (
            e["kind"] == "step"
            and e["generation"] >= world["generation"]
            and e["protected"] > least
        ),
        after=after,
    )
    return int(event["protected"])


@pytest.mark.parametrize(
    ("victim", "points"),
    [
        ("worker", STATES),
        pytest.param("worker", OTHERS, marks=pytest.mark.exhaustive),
        pytest.param("node", STATES, marks=pytest.mark.exhaustive),
        pytest.param("agent", STATES, marks=pytest.mark.exhaustive),
        pytest.param("machine", STATES, marks=pytest.mark.exhaustive),
    ],
)
def test_the_job_goes_on_whoever_dies_at_any_state_of_a_slot(
    tmp_path: Path, victim: str, points: tuple[str, ...]
) -> None:
    order = tmp_path / "stop-at"
    with (
        stopping_at(order),
        job(
            tmp_path,
            "--grow",
            str(GROW),
            "--seconds",
            str(STEP_S),
            script=REMEMBERING,
            nodes=len(NODES),
            per_node=1,
            node_restarts=100,
            max_attempts=100,
            timing={"stop_grace_s": 30.0},
        ) as running,
    ):
        running.await_event(lambda e: e["kind"] == "step" and e["protected"] >= 3)
        for point in points:
            node = stop_somewhere(running, order, point)
            steps = running.events("step")
            after, reached = len(running.history), max(int(e["protected"]) for e in steps)
            end(running, node, victim)
            assert whole_again(running, after=after, least=reached) > reached, point
        endings = {event["status"] for event in running.events("worker_exited")}
        assert endings <= {"killed by SIGKILL"}, "every block that was restored is right"
