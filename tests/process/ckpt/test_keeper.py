"""The service keeper: one service for all its users, which ends with the last of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import keeper
import pytest

SERVICE = """
import contextlib, os, sys
from pathlib import Path
sys.path.insert(0, {services!r})
import keeper

@contextlib.contextmanager
def service(folder):
    if {refused!r}:
        raise keeper.CannotInstall("no such package")
    with (folder / "out").open("ab") as log:
        process = keeper.launch(["sleep", "1000"], log)
    try:
        yield {{"pid": process.pid, "keeper": os.getpid()}}
    finally:
        keeper.end(process)

keeper.keep(Path(sys.argv[2]), service)
"""

USER = """
import sys
from pathlib import Path
sys.path.insert(0, {services!r})
import keeper
with keeper.shared(Path(sys.argv[1]), Path(sys.argv[2])) as facts:
    print(facts["pid"], facts["keeper"], flush=True)
    sys.stdin.read()
"""


def script(folder: Path, *, refused: bool = False) -> Path:
    path = folder / "service.py"
    services = str(Path(keeper.__file__).parent)
    path.write_text(SERVICE.format(services=services, refused=refused))
    return path


def start_user(folder: Path, service: Path) -> tuple[subprocess.Popen[str], int, int]:
    program = USER.format(services=str(Path(keeper.__file__).parent))
    user = subprocess.Popen(
        [sys.executable, "-c", program, str(folder), str(service)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdout is not None
    pid, number = user.stdout.readline().split()
    return user, int(pid), int(number)


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_users_share_one_and_the_last_ends_it(tmp_path: Path) -> None:
    service = script(tmp_path)
    with (
        keeper.shared(tmp_path / "s", service) as one,
        keeper.shared(tmp_path / "s", service) as two,
    ):
        assert one == two
        assert lives(one["pid"])
    until(lambda: not lives(one["pid"]) and not lives(one["keeper"]))
    with keeper.shared(tmp_path / "s", service) as anew:
        assert anew["pid"] != one["pid"]


def test_it_outlives_a_killed_user_only_while_there_is_another(tmp_path: Path) -> None:
    service = script(tmp_path)
    first, pid, number = start_user(tmp_path / "s", service)
    second, same, _ = start_user(tmp_path / "s", service)
    assert pid == same
    first.send_signal(signal.SIGKILL)
    first.communicate()
    third, same, _ = start_user(tmp_path / "s", service)
    assert pid == same
    for user in (second, third):
        user.send_signal(signal.SIGKILL)
        user.communicate()
    until(lambda: not lives(pid) and not lives(number))


def test_it_dies_with_its_keeper_and_is_started_anew(tmp_path: Path) -> None:
    service = script(tmp_path)
    with keeper.shared(tmp_path / "s", service) as facts:
        os.kill(facts["keeper"], signal.SIGKILL)
        until(lambda: not lives(facts["pid"]))
        user, pid, _ = start_user(tmp_path / "s", service)
        assert pid != facts["pid"]
        user.communicate("")
    until(lambda: not lives(pid))


def test_what_cannot_be_installed_is_said(tmp_path: Path) -> None:
    service = script(tmp_path, refused=True)
    with (
        pytest.raises(keeper.CannotInstall, match="no such package"),
        keeper.shared(tmp_path / "s", service),
    ):
        raise AssertionError("it runs")


def test_what_does_not_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text("raise SystemExit('it broke')")
    with (
        pytest.raises(keeper.DidNotStart, match="it broke"),
        keeper.shared(tmp_path / "s", tmp_path / "service.py"),
    ):
        raise AssertionError("it runs")
