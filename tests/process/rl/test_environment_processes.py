"""Environments in processes of their own: hanging, dying, greedy, garbled ones, and no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs import hurt
from sidecar_group import wait_until
from tree import HELPERS

from holdfast.adapters.rl.environments.base import Action, Failed, Observation, Reply
from holdfast.adapters.rl.environments.process_settings import ProcessConfig
from holdfast.adapters.rl.environments.processes.calls import ProcessCalls, ProcessEnvironment
from holdfast.adapters.rl.environments.processes.pool import ProcessPool
from holdfast.adapters.rl.environments.processes.sandbox import lacking
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.samples.trajectory import SampleId
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.tools.leftovers import processes_of

DEADLINE_S = 120.0
PATIENT_S = 60.0
PATH = os.pathsep.join([str(HELPERS), str(Path(__file__).parent), *sys.path])
FINE = Observation(text="fine", state={"turn": 1})

Start = Callable[..., ProcessCalls]


def chosen(folder: Path, *, limit_s: float = PATIENT_S, attempts: int = 2, **given: Any) -> Any:
    """Return a wayward environment's settings; those of its processes are in ``processes``.

    They do not yield to the tests that run beside it.
    """
    usual = {"count": 2, "yields": False, "writable": (str(folder),)}
    processes = usual | given.pop("processes", {})
    return EnvironmentConfig(
        factory="wayward_environment:Wayward",
        settings={"folder": str(folder), **given},
        limit_s=limit_s,
        attempts=attempts,
        processes=msgspec.convert(processes, ProcessConfig),
    )


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start pools, whose processes are gone afterwards."""
    monkeypatch.syspath_prepend(HELPERS)
    pools = []

    def started(**given: Any) -> ProcessCalls:
        config = chosen(tmp_path, **given)
        pool = ProcessPool(config, seed=7, owner=str(tmp_path))
        pools.append(pool)
        return ProcessCalls(pool, config)

    yield started
    for pool in pools:
        pool.close()
    wait_until(lambda: processes_of(str(tmp_path)) == [], "no environment process left")


def action(text: str, ordinal: int = 0) -> Action:
    return Action(ordinal=ordinal, sample=0, turn=1, text=text, ended=True)


def reply(calls: ProcessCalls, text: str, ordinal: int = 0) -> Reply:
    """Return the reply to one action."""
    calls.submit(action(text, ordinal))
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        for _, found in calls.replies(1.0):
            return found
    raise AssertionError("no reply in time")


def calls_of(folder: Path, ordinal: int = 0) -> list[str]:
    """Return the process of each call, as it knows itself."""
    return (folder / f"calls-{ordinal}").read_text().splitlines()


def test_a_reply_is_the_environments_and_its_process_serves_again(
    start: Start, tmp_path: Path
) -> None:
    calls = start()
    for _ in range(5):
        assert reply(calls, "fine") == FINE
    assert len(set(calls_of(tmp_path))) == 1


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="no groups by session here")
@pytest.mark.parametrize("yields", [True, False])
def test_the_session_of_the_environments_comes_after_others(
    start: Start, tmp_path: Path, yields: bool
) -> None:
    """The policy of a process alone does not yield to a process of another session."""
    calls = start(processes={"yields": yields, "sandbox": "off"})
    assert reply(calls, "fine") == FINE
    (pid,) = set(calls_of(tmp_path))
    group = Path(f"/proc/{pid}/autogroup").read_text()
    if not group:
        pytest.skip("the kernel gives no session a group here")
    assert group != Path("/proc/self/autogroup").read_text()  # empty outside every session's group
    assert group.endswith(" nice 19\n" if yields else " nice 0\n")


def gather(calls: ProcessCalls, count: int) -> dict[SampleId, Reply]:
    """Return so many replies."""
    found: dict[SampleId, Reply] = {}

    def is_all() -> bool:
        found.update(calls.replies(0.1))
        return len(found) == count

    wait_until(is_all, f"{count} replies")
    return found


def test_many_calls_are_at_work_at_once_and_no_more_than_there_are_processes(
    start: Start, tmp_path: Path
) -> None:
    calls = start(processes={"count": 3})
    for ordinal in range(12):
        calls.submit(action("fine", ordinal))
    assert list(gather(calls, 12).values()) == [FINE] * 12
    used = {process for ordinal in range(12) for process in calls_of(tmp_path, ordinal)}
    assert 1 <= len(used) <= 3


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("die", "its process ended: killed by SIGKILL"),
        ("exit", "its process ended: exit status 3"),
        ("memory", "its process needed more than 64MiB of memory"),
        ("shared memory", "its process needed more than 64MiB of memory"),
        ("garbage", "its process was given up: it sent garbage"),
        ("close", "its process was given up: it closed its connection"),
        ("tool", "the tool is out of order"),
    ],
)
def test_a_call_that_fails_is_made_again_in_another_process_and_then_given_up(
    start: Start, tmp_path: Path, how: str, why: str
) -> None:
    calls = start(times=1, processes={"memory": "64MiB"})
    assert reply(calls, how) == Observation(text="well", state={"turn": 1})
    assert len(calls_of(tmp_path)) == 2
    assert len(set(calls_of(tmp_path))) == (1 if how == "tool" else 2)
    calls = start(processes={"memory": "64MiB"})
    found = reply(calls, how, ordinal=1)
    assert isinstance(found, Failed)
    assert found.reason.startswith(f"turn 1 was given up after 2 attempts: {why}")
    assert len(calls_of(tmp_path, 1)) == 2
    assert reply(calls, "fine", ordinal=2) == FINE


def test_a_call_that_takes_too_long_is_killed_and_holds_up_no_other(
    start: Start, tmp_path: Path
) -> None:
    calls = start(limit_s=3.0, times=1)
    calls.submit(action("hang", 0))
    assert reply(calls, "fine", ordinal=1) == FINE
    assert gather(calls, 1) == {(0, 0): Observation(text="well", state={"turn": 1})}
    assert len(set(calls_of(tmp_path))) == 2


def test_a_call_may_use_so_much_of_the_processor(start: Start) -> None:
    calls = start(attempts=1, limit_s=DEADLINE_S, processes={"cpu_s": 0.2})
    for ordinal in range(3):
        assert reply(calls, "fine", ordinal=ordinal) == FINE, "the limit is of each call"
    found = reply(calls, "spin", ordinal=9)
    why = "its process used more than 0.2 s of processor"
    assert found == Failed(reason=f"turn 1 was given up after 1 attempts: {why}")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"Wayward.respond for turn 1 of sample \(0, 0\): ZeroDivisionError: division"),
        ("nothing", r"sample \(0, 0\): ArgumentError: Observation\(text=None\): give a text"),
    ],
)
def test_a_fault_of_the_environments_code_ends_the_worker_and_is_named(
    start: Start, how: str, message: str
) -> None:
    with pytest.raises(JobFailedError, match=message):
        reply(start(), how)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"colour": "red"}, ConfigError, "does not take the settings .*colour"),
        ({"start": "raise"}, ConfigError, "Wayward' in processes: ZeroDivisionError: division"),
        ({"start": "exit"}, JobFailedError, "4 processes one after the other .* exit status 3"),
        (
            {"start": "hang", "processes": {"start_s": 0.2}},
            JobFailedError,
            r"4 processes one after the other did not make it: it is not made after 0.2 s",
        ),
        ({"processes": {"preload": ["no_module"]}}, ConfigError, "no_module cannot be imported"),
        ({"processes": {"writable": ["/no/place"]}}, ConfigError, "'/no/place', which is no dir"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_by_name(
    start: Start, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        start(**given)


def test_an_environment_may_start_slowly(start: Start) -> None:
    calls = start(slow_s=1.0, limit_s=0.5)
    for ordinal in range(4):
        calls.submit(action("fine", ordinal))
    assert list(gather(calls, 4).values()) == [FINE] * 4, "the limit is not for the start"


def test_the_server_of_the_processes_may_die_too(start: Start, tmp_path: Path) -> None:
    calls = start(times=1)
    calls.submit(action("hang"))
    wait_until((tmp_path / "calls-0").exists, "a call that hangs")
    hurt(calls.pool.pid)
    assert gather(calls, 1) == {(0, 0): Observation(text="well", state={"turn": 1})}


def test_a_prompt_comes_from_a_process_and_is_asked_for_again(start: Start, tmp_path: Path) -> None:
    calls = start()
    environment = ProcessEnvironment(calls.pool, chosen(tmp_path))
    assert environment.prompt(3) == "3>"
    assert environment.respond(action("fine")) == FINE
    with pytest.raises(JobFailedError, match=r"prompt for ordinal 13: .*killed by SIGKILL"):
        environment.prompt(13)
    assert environment.prompt(4) == "4>"


CRASHING = """
import sys, time
from test_environment_processes import action, chosen
from holdfast.adapters.rl.environments.processes.calls import ProcessCalls
from holdfast.adapters.rl.environments.processes.pool import ProcessPool
from pathlib import Path
folder = Path(sys.argv[1])
config = chosen(folder, processes={"sandbox": sys.argv[2]})
calls = ProcessCalls(ProcessPool(config, seed=7, owner=str(folder)), config)
calls.submit(action(sys.argv[3], 0))
calls.submit(action("hang", 1))
while True:
    calls.replies(1.0)
"""


@pytest.mark.parametrize(("sandbox", "how"), [("require", "hide"), ("off", "hang")])
def test_no_process_outlives_a_killed_worker(tmp_path: Path, sandbox: str, how: str) -> None:
    if sandbox == "require" and lacking():
        pytest.skip(f"no sandbox here: {lacking()}")
    worker = subprocess.Popen(
        [sys.executable, "-c", CRASHING, str(tmp_path), sandbox, how],
        env={**os.environ, "PYTHONPATH": PATH},
    )
    try:
        wait_until((tmp_path / "calls-1").exists, "two calls that hang")
        hidden = tmp_path / "hidden"
        wait_until(lambda: how != "hide" or hidden.exists(), "a process that hides")
        inside = [each for each in processes_of(str(tmp_path)) if each != worker.pid]
        assert len(inside) >= (5 if how == "hide" else 3)
        for each in inside:
            hurt(each, signal.SIGSTOP)  # the kernel ends them: they can do nothing themselves
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: processes_of(str(tmp_path)) == [], "no environment process left")


def test_a_sandbox_keeps_from_the_network_and_from_files(start: Start, tmp_path: Path) -> None:
    if lacking():
        pytest.skip(f"no sandbox here: {lacking()}")
    calls = start(processes={"sandbox": "require"})
    found = {}
    for number, how in enumerate(("network", "write", "temporary", "remount", "keys")):
        observed = reply(calls, how, ordinal=number)
        assert isinstance(observed, Observation)
        found[how] = observed.text
    assert found.pop("remount") != "0"
    assert found == {
        "network": "lo",
        "write": "Read-only file system",
        "temporary": "/dev/shm",
        "keys": "",
    }
    assert (tmp_path / "calls-0").exists(), "a writable directory"


def test_without_a_sandbox_there_are_network_and_files(start: Start) -> None:
    calls = start(processes={"sandbox": "off"})
    observed = reply(calls, "temporary")
    assert isinstance(observed, Observation)
    assert observed.text == tempfile.gettempdir()


REFUSED = """
import sys
from test_environment_processes import action, chosen, reply
from holdfast.adapters.rl.environments.processes.calls import ProcessCalls
from holdfast.adapters.rl.environments.processes.pool import ProcessPool
from holdfast.elastic.errors import ConfigError
from pathlib import Path
folder = Path(sys.argv[1])
config = chosen(folder)
pool = ProcessPool(config, seed=7, owner=str(folder))
print(sorted(pool.missing), reply(ProcessCalls(pool, config), "fine").text)
try:
    ProcessPool(chosen(folder, processes={"sandbox": "require"}), seed=7, owner=str(folder))
except ConfigError as error:
    print(error)
"""


def test_protection_that_the_kernel_refuses_is_told_or_refused(tmp_path: Path) -> None:
    """In a namespace without rights to another, the kernel refuses as a strict machine does."""
    none_more = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    strict = ["unshare", "--user", "--map-root-user", "sh", "-c", none_more, "sh"]
    done = subprocess.run(
        [*([] if lacking() else strict), sys.executable, "-c", REFUSED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told, refusal = done.stdout.splitlines()
    assert told == "['files', 'network', 'processes'] fine"
    assert "the sandbox is required, and this machine lacks it: processes: no user names" in refusal
