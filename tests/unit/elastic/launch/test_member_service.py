"""The process of an etcd member waits for a launcher to come back, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.elastic.launch.member_process import MemberProcess
from holdfast.elastic.launch.member_service import (
    MemberRecord,
    MemberService,
    MemberServiceConfig,
    own_member,
    read_member,
    read_member_pid,
    write_member,
)
from holdfast.elastic.processes.log_files import last_words

DEADLINE_S = 30.0
STAYS = (sys.executable, "-c", "import time; time.sleep(600)")


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "etcd"
    found.mkdir()
    return found


@pytest.fixture
def owners() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def config(folder: Path, *argv: str, return_s: float = 0.0) -> MemberServiceConfig:
    return MemberServiceConfig(
        folder=str(folder),
        argv=argv or STAYS,
        log=str(folder.parent / "etcd.log"),
        return_s=return_s,
    )


def serving(service: MemberService) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(service.serve()))
    thread.start()
    return thread, codes


def test_it_ends_with_its_data_when_no_launcher_comes_back(
    folder: Path, owners: Callable[[], subprocess.Popen[bytes]]
) -> None:
    first = owners()
    own_member(folder, first.pid)
    service = MemberService(config(folder))
    thread, codes = serving(service)
    until(lambda: service._owner.lives(0))
    assert thread.is_alive()
    first.kill()
    thread.join(DEADLINE_S)
    assert codes == [0]
    assert not folder.exists() and not service._etcd.alive


def test_a_launcher_that_comes_back_in_time_keeps_it(
    folder: Path, owners: Callable[[], subprocess.Popen[bytes]]
) -> None:
    first, second = owners(), owners()
    own_member(folder, first.pid)
    service = MemberService(config(folder, return_s=600))
    thread, codes = serving(service)
    until(lambda: service._named == first.pid)
    first.kill()
    until(lambda: not service._owner.lives(0))
    own_member(folder, second.pid)
    until(lambda: service._named == second.pid and service._owner.lives(0))
    assert service._etcd.alive
    service.stopped.set()
    thread.join(DEADLINE_S)
    assert codes == [0]


def test_the_data_stays_if_etcd_ends_by_itself(folder: Path) -> None:
    service = MemberService(config(folder, sys.executable, "-c", "print('told why')", return_s=600))
    assert service.serve() == 1
    assert folder.exists()
    assert "told why" in (folder.parent / "etcd.log").read_text()


def test_a_record_is_read_back_and_a_broken_one_is_none(folder: Path) -> None:
    assert read_member(folder) is None and read_member_pid(folder) == 0
    record = MemberRecord(job="j", authority="a", token="t", id=7, endpoint="h:1")
    write_member(folder, record)
    assert read_member(folder) == record
    (folder / "member.json").write_text("{")
    (folder / "pid").write_text("x")
    assert read_member(folder) is None and read_member_pid(folder) == 0


@pytest.mark.slow
def test_a_launcher_starts_it_and_another_takes_it_up(folder: Path) -> None:
    started = MemberProcess.start(config(folder, return_s=600), token="t")
    try:
        assert started.alive
        assert MemberProcess.found(folder, token="another") is None
        found = MemberProcess.found(folder, token="t")
        assert found is not None and found.alive
        found.close()
        until(lambda: not started.alive)
        assert not folder.exists()
    finally:
        started.kill()


@pytest.mark.slow
def test_a_program_that_does_not_start_is_named_in_the_log(folder: Path) -> None:
    started = MemberProcess.start(config(folder, "/nowhere/etcd", return_s=600), token="t")
    until(lambda: not started.alive)
    started.kill()
    assert "/nowhere/etcd" in last_words(folder.parent / "etcd.log")
    assert MemberProcess.found(folder, token="t") is None
