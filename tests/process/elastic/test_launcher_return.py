"""A killed launcher that is started again continues its job from the memory of the nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from session_imports import IMPORTING_ONCE
from undisturbed import WAITING, alone, weights

from holdfast.ckpt.memory.arena import arenas_of, sweep
from holdfast.ckpt.memory.kept import is_kept
from holdfast.elastic.agent.reporting import read_all_processes
from holdfast.elastic.coordinator.service import RECORD
from holdfast.elastic.launch.coordinator_process import read_record
from holdfast.tools.leftovers import leftovers, memory_of, processes_of

DEADLINE_S = 100.0


class Job:
    """The same command in the same run directory, started as often as a test asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.commands: list[subprocess.Popen[str]] = []

    def start(self, *options: str) -> None:
        script = [str(WAITING)]
        self.commands.append(
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "holdfast.tools.cli", "run"),
                    *("--nodes", "2", "--run-dir", str(self.run_dir), *options, *script),
                ],
                stderr=(self.folder / "stderr").open("ab"),
                text=True,
                env={
                    **os.environ,
                    **IMPORTING_ONCE,
                    "HOLDFAST_TEST_LOG": str(self.folder / "log"),
                    "HOLDFAST_TEST_END": str(self.folder / "end"),
                    "OMP_NUM_THREADS": "1",
                },
            )
        )

    def kill(self) -> None:
        self.commands[-1].kill()
        self.commands[-1].wait()

    def finish(self) -> int:
        (self.folder / "end").touch()
        return self.commands[-1].wait(DEADLINE_S)

    @property
    def run(self) -> str:
        record = read_record(self.run_dir)
        assert record is not None
        return record.run

    def coordinator(self) -> int:
        record = read_record(self.run_dir)
        assert record is not None
        return record.pid

    def is_kept(self) -> bool:
        """Say whether the memory of both nodes stays if all processes are killed."""
        return sum(map(is_kept, arenas_of(self.run))) == 2

    def lines(self) -> list[dict[str, Any]]:
        log = self.folder / "log"
        text = log.read_bytes() if log.exists() else b""
        return [msgspec.json.decode(line) for line in text.splitlines()]

    def wait_for(self, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < deadline_s, (self.folder / "stderr").read_text()
            time.sleep(0.02)

    def await_waiting(self, *, after: int = 0) -> list[dict[str, Any]]:
        """Wait until both ranks wait in step 6, by lines from number ``after`` on."""

        def waiting() -> bool:
            found = {line["rank"] for line in self.lines()[after:] if line.get("waits") == 6}
            return found == {0, 1}

        self.wait_for(waiting)
        return self.lines()[after:]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for command in made.commands:
        command.kill()
        command.wait()
    if record := read_record(made.run_dir):
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
        assert leftovers(record.run, timeout_s=DEADLINE_S) == []


def test_a_job_goes_on_in_memory_when_its_killed_launcher_is_back(job: Job) -> None:
    job.start()
    job.await_waiting()
    job.wait_for(lambda: {n.progress for n in read_all_processes(job.run_dir).values()} == {6})
    run, coordinator, seen = job.run, job.coordinator(), len(job.lines())
    job.kill()
    job.wait_for(lambda: processes_of(run) == [coordinator])
    assert len(memory_of(run)) >= 2
    job.start()
    begun = [line["begins"] for line in job.await_waiting(after=seen) if "begins" in line]
    assert {*begun} == {6}, "no step is lost, and there is no checkpoint"
    assert (job.run, job.coordinator()) == (run, coordinator)
    assert job.finish() == 0
    done = [line for line in job.lines() if "done" in line]
    assert [weights(line) for line in done] == [alone(), alone()]
    assert not (job.run_dir / RECORD).exists()
    assert leftovers(run, timeout_s=DEADLINE_S) == []


def test_a_job_goes_on_when_its_coordinator_is_killed(job: Job) -> None:
    job.start()
    job.await_waiting()
    run, before = job.run, job.coordinator()
    os.kill(before, signal.SIGKILL)
    job.wait_for(lambda: (record := read_record(job.run_dir)) is not None and record.pid != before)
    worker = read_all_processes(job.run_dir)["node1"].workers["trainer/1"]
    seen = len(job.lines())
    with contextlib.suppress(ProcessLookupError):  # its node was without a coordinator too long
        os.kill(worker, signal.SIGKILL)
    job.wait_for(lambda: any("begins" in line for line in job.lines()[seen:]))
    assert job.finish() == 0
    done = [weights(line) for line in job.lines() if "done" in line]
    assert done == [alone()] * max(len(done), 1), "the survivor may end before the other is back"
    assert leftovers(run, timeout_s=DEADLINE_S) == []


@pytest.mark.parametrize(
    "victims",
    [
        ("launcher", "coordinator"),
        pytest.param(("coordinator", "launcher"), marks=pytest.mark.exhaustive),
        pytest.param(("coordinator", "return", "launcher"), marks=pytest.mark.exhaustive),
        pytest.param(("launcher", "end", "coordinator"), marks=pytest.mark.exhaustive),
    ],
    ids="-".join,
)
def test_a_job_goes_on_in_memory_when_both_are_killed(job: Job, victims: tuple[str, ...]) -> None:
    job.start()
    job.await_waiting()
    job.wait_for(lambda: {n.progress for n in read_all_processes(job.run_dir).values()} == {6})
    job.wait_for(job.is_kept)
    run, coordinator, seen = job.run, job.coordinator(), len(job.lines())
    for victim in victims:
        if victim == "launcher":
            job.commands[-1].kill()
        elif victim == "coordinator":
            os.kill(coordinator, signal.SIGKILL)
        elif victim == "return":
            job.wait_for(lambda: job.coordinator() != coordinator)
            os.kill(job.coordinator(), signal.SIGKILL)
        else:
            job.wait_for(lambda: processes_of(run) == [coordinator])
    job.commands[-1].wait()
    job.wait_for(lambda: processes_of(run) == [])
    sweep()  # as the start of any other job does
    assert len(memory_of(run)) >= 2
    job.start()
    begun = [line["begins"] for line in job.await_waiting(after=seen) if "begins" in line]
    assert {*begun} == {6}, "no step is lost, and there is no checkpoint"
    assert job.run == run
    assert job.finish() == 0
    done = [line for line in job.lines() if "done" in line]
    assert [weights(line) for line in done] == [alone(), alone()]
    assert leftovers(run, timeout_s=DEADLINE_S) == []


@pytest.mark.exhaustive
def test_when_both_are_killed_another_command_begins_its_own_job(job: Job) -> None:
    job.start()
    job.await_waiting()
    job.wait_for(job.is_kept)
    run, coordinator, seen = job.run, job.coordinator(), len(job.lines())
    job.kill()
    os.kill(coordinator, signal.SIGKILL)
    job.wait_for(lambda: processes_of(run) == [])
    job.start("--min-hang-s", "31", "--parity", "0")
    begun = [line["begins"] for line in job.await_waiting(after=seen) if "begins" in line]
    assert {*begun} == {0}
    assert memory_of(run) == []
    assert job.finish() == 0


@pytest.mark.exhaustive
def test_another_command_in_the_directory_begins_its_own_job(job: Job) -> None:
    job.start()
    job.await_waiting()
    run, seen = job.run, len(job.lines())
    job.kill()
    job.start("--nproc", "1", "--world", "2", "--parity", "0", "--min-hang-s", "31")
    begun = [line["begins"] for line in job.await_waiting(after=seen) if "begins" in line]
    assert {*begun} == {0}
    assert job.run != run
    assert "it is not continued" in (job.folder / "stderr").read_text()
    assert job.finish() == 0
    assert leftovers(run, timeout_s=DEADLINE_S) == []


def test_without_a_return_nothing_stays(job: Job) -> None:
    job.start("--return-s", "0.5")
    job.await_waiting()
    run = job.run
    job.kill()
    assert leftovers(run, timeout_s=DEADLINE_S) == []
