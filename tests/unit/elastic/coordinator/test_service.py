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
from holdfast.ckpt.memory.kept import is_kept
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.service import (
    LauncherRecord,
    Service,
    ServiceConfig,
    drop_memory,
    launcher_key,
)
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.launch import coordinator_process
from holdfast.elastic.launch.coordinator_process import CoordinatorProcess, read_record
from holdfast.elastic.membership.view import encode

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
        said = LauncherRecord(pid=self.launchers[-1].pid, nodes=("n0", "n1"))
        client.put(launcher_key(RUN), encode(said))
        client.close()

    def killed(self) -> None:
        """Stop as if by SIGKILL: nothing is given up."""

        def forget() -> None:
            self.service._server.close()
            for node in [*self.service._arenas]:
                self.service._let_go(node)

        self.service._forget = forget  # type: ignore[method-assign]
        self.close()

    def close(self) -> None:
        self.service.stopped.set()
        self.thread.join(DEADLINE_S)
        for each in self.launchers:
            each.kill()
            each.communicate()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[float], Serving]]:
    made: list[Serving] = []

    def serving(return_s: float) -> Serving:
        made.append(Serving(tmp_path, return_s=return_s))
        return made[-1]

    yield serving
    for each in made:
        each.close()
    drop_memory(RUN)


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
    descriptor = hold(NODE)
    serving.thread.start()
    wait_for(lambda: serving.service._arenas.get("n0", -1) >= 0)
    os.close(descriptor)
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
    wait_for(lambda: serving.service._launcher.pid == serving.launchers[1].pid)
    found = CoordinatorProcess.found(serving.directory, serving.key)
    assert found is not None
    assert (found.run, found.job) == (RUN, "job")


def test_memory_stays_for_the_return_when_the_service_is_killed_too(
    make: Callable[[float], Serving],
) -> None:
    serving = make(DEADLINE_S)
    os.close(hold(NODE))
    serving.launcher()
    serving.thread.start()
    wait_for(lambda: is_kept(NODE))
    serving.killed()
    assert sweep(exactly=NODE.name) == []
    record = read_record(serving.directory)
    assert record is not None, "the next launcher finds it"
    drop_memory(record.run)
    assert not NODE.exists()


@pytest.mark.parametrize("said", ["", "17", '{"pid": -1}', '{"pid": 1, "nodes": ["../n"]}'])
def test_a_record_of_no_launcher_is_passed_over(
    make: Callable[[float], Serving], said: str
) -> None:
    serving = make(DEADLINE_S)
    serving.thread.start()
    record = read_record(serving.directory)
    assert record is not None
    client = connect(record.address, serving.key)
    client.put(launcher_key(RUN), said)
    wait_for(lambda: serving.service._written == said)
    client.close()
    serving.launcher()
    wait_for(lambda: serving.service._launcher.pid == serving.launchers[0].pid)


def test_memory_that_is_taken_away_is_let_go_and_the_next_one_is_held(
    make: Callable[[float], Serving],
) -> None:
    serving = make(DEADLINE_S)
    os.close(hold(NODE))
    serving.launcher()
    serving.thread.start()
    wait_for(lambda: serving.service._arenas.get("n0", -1) >= 0)
    with take_away(NODE):
        pass
    wait_for(lambda: serving.service._arenas["n0"] == -1)
    assert not NODE.exists()
    os.close(hold(NODE))
    wait_for(lambda: serving.service._arenas["n0"] >= 0)


def test_a_coordinator_that_cannot_serve_is_named_with_its_reason(
    make: Callable[[float], Serving],
) -> None:
    serving = make(DEADLINE_S)
    serving.thread.start()  # the journal is in use
    with pytest.raises(CoordinatorError, match="another process serves the coordinator"):
        CoordinatorProcess.start(serving.config)


def test_a_coordinator_whose_log_cannot_be_written_is_named(tmp_path: Path) -> None:
    config = ServiceConfig(
        run=RUN, job="", run_dir=str(tmp_path), key_file="", bind="", return_s=1.0
    )
    with pytest.raises(CoordinatorError, match="cannot be started"):
        CoordinatorProcess.start(config)


def test_a_record_of_a_process_that_does_not_know_the_key_harms_nobody(
    make: Callable[[float], Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_process, "_ANSWER_S", 0.5)
    serving = make(DEADLINE_S)
    serving.thread.start()
    assert CoordinatorProcess.found(serving.directory, RunKey.new()) is None
    assert serving.thread.is_alive(), "its command line is not that of a coordinator"
