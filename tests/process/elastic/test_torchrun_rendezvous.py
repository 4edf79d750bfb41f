"""torchrun with Holdfast's rendezvous: real agents that die, return and lose workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torchruns import torchruns
from tree import HELPERS

WORKER = HELPERS / "meeting_worker.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_agents_meet_go_on_without_a_lost_one_and_take_another_in(tmp_path: Path) -> None:
    with torchruns(tmp_path, WORKER) as job:
        first = job.start("--nnodes=1:2", conf="last_call_timeout=60")
        job.start("--nnodes=1:2", conf="last_call_timeout=60")
        both = job.await_lines(lambda line: line["world"] == 2, count=2)
        assert sorted(line["rank"] for line in both) == [0, 1]
        assert all(line["sum"] == 2 for line in both)
        first.kill()  # it serves the coordinator, too
        after = len(job.lines())
        (alone,) = job.await_lines(lambda line: line["world"] == 1, count=1, after=after)
        assert alone["agent"] != first.pid
        assert alone["restarts"] == 0  # a change of the world is no failure
        third = job.start("--nnodes=1:2")
        again = job.await_lines(lambda line: line["world"] == 2, count=2, after=after)
        assert {line["agent"] for line in again} == {alone["agent"], third.pid}
        job.finish(third)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.exhaustive  # so are the processes of a job beside a sidecar, each time
def test_a_killed_worker_restarts_and_all_meet_again(tmp_path: Path) -> None:
    with torchruns(tmp_path, WORKER) as job:
        agents = [job.start("--nnodes=2", "--max-restarts=2") for _ in range(2)]
        before = job.await_lines(lambda line: line["world"] == 2, count=2)
        os.kill(before[0]["pid"], signal.SIGKILL)
        after = job.await_lines(lambda line: line["world"] == 2, count=2, after=2)
        assert not {line["pid"] for line in before} & {line["pid"] for line in after}
        assert sorted(line["restarts"] for line in after) == [0, 1]
        job.finish(*agents)
