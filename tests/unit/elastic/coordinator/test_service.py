"""The coordinator's own process keeps the memory of nodes until a launcher comes back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.ckpt.memory.arena import arena_path, hold, sweep, take_away
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.service import Service, ServiceConfig, launcher_key
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch.coordinator_process import CoordinatorProcess, read_record

DEADLINE_S = 30.0
RUN = f"service-{os.getpid()}"
NODE = arena_path(RUN, "n0")


class Serving:
    """A service on a thread of the test, and a process that stands for its launcher."""

    def __init__(self, directory: Path, *, return_s: float) -> None:
        self.directory, self.key = directory, RunKey.new()
        (directory / "logs").mkdir()
        self.key.save(directory / "key.json")
        self.config = ServiceConfig(
            run=RUN,
            job="job",
            run_dir=str(directory),
            key_file=str(directory / "key.json"),
            bind="tcp://127.0.0.1:*",
            nodes=("n0", "n1"),
            return_s=return_s,
        )
        self.service = Service(self.config)
        self.thread = threading.Thread(target=self.service.serve)
        self.launchers: list[subprocess.Popen[bytes]] = []

    def launcher(self) -> None:
        self.launchers.append(
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        )
        record = read_record(self.directory)
        assert record is not None
        client = connect(record.address, self.key)
        client.put(launcher_key(RUN), str(self.launchers[-1].pid))
        client.close()

    def close(self) -> None:
        self.service.stopped.set()
        self.thread.join(DEADLINE_S)
        for each in self.launchers:
            each.kill()
            each.communicate()
        sweep(exactly=NODE.name)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[float], Serving]]:
    made: list[Serving] = []

    def serving(return_s: float) -> Serving:
        made.append(Serving(tmp_path, return_s=return_s))
        return made[-1]

    yield serving
    for each in made:
        each.close()


def wait_for(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_memory_outlives_its_launcher_and_goes_when_none_comes_back(
    make: Callable[[float], Serving],
) -> None:
    serving = make(0.5)
    serving.launcher()
    held = hold(NODE)
    serving.thread.start()
    wait_for(lambda: serving.service._held.get("n0", -1) >= 0)
    os.close(held)
    assert sweep(exactly=NODE.name) == [], "the service holds it"
    serving.launchers[0].kill()
    serving.thread.join(DEADLINE_S)
    assert not serving.thread.is_alive()
    assert not NODE.exists()


def test_a_launcher_that_comes_back_ends_the_wait(make: Callable[[float], Serving]) -> None:
    serving = make(DEADLINE_S)
    serving.launcher()
    serving.thread.start()
    serving.launchers[0].kill()
    serving.launchers[0].wait()
    serving.launcher()
    wait_for(lambda: serving.service._launcher == str(serving.launchers[1].pid))
    found = CoordinatorProcess.found(serving.directory, serving.key)
    assert found is not None
    assert (found.run, found.job) == (RUN, "job")


def test_memory_that_is_taken_away_is_let_go_and_the_next_one_is_held(
    make: Callable[[float], Serving],
) -> None:
    serving = make(DEADLINE_S)
    os.close(hold(NODE))
    serving.thread.start()
    wait_for(lambda: serving.service._held.get("n0", -1) >= 0)
    with take_away(NODE):
        pass
    wait_for(lambda: serving.service._held["n0"] == -1)
    assert not NODE.exists()
    os.close(hold(NODE))
    wait_for(lambda: serving.service._held["n0"] >= 0)


def test_a_coordinator_that_cannot_serve_is_named_with_its_reason(
    make: Callable[[float], Serving],
) -> None:
    serving = make(DEADLINE_S)
    serving.thread.start()  # the journal is in use
    with pytest.raises(CoordinatorError, match="another process serves the coordinator"):
        CoordinatorProcess.start(serving.config)


def test_a_coordinator_whose_log_cannot_be_written_is_named(tmp_path: Path) -> None:
    config = ServiceConfig(
        run=RUN, job="", run_dir=str(tmp_path), key_file="", bind="", nodes=(), return_s=1.0
    )
    with pytest.raises(CoordinatorError, match="cannot be started"):
        CoordinatorProcess.start(config)


def test_a_record_of_a_process_that_does_not_know_the_key_harms_nobody(
    make: Callable[[float], Serving],
) -> None:
    serving = make(DEADLINE_S)
    serving.thread.start()
    assert CoordinatorProcess.found(serving.directory, RunKey.new()) is None
    assert serving.thread.is_alive(), "its command line is not that of a coordinator"
