"""Logs that other processes write stay within a bound."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from holdfast.elastic.agent.reporting import Reporter
from holdfast.elastic.processes import log_files
from holdfast.elastic.processes.log_files import bound


def test_a_large_log_is_emptied_under_its_writer_and_its_content_kept_once(tmp_path: Path) -> None:
    log, before = tmp_path / "w.log", tmp_path / "w.log.1"
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for text in (b"a" * 101, b"b" * 101):
        os.write(fd, text)
        bound(log, most_bytes=100)
        assert (log.stat().st_size, before.read_bytes()) == (0, text)
    os.write(fd, b"c" * 100)
    bound(log, most_bytes=100)
    assert log.read_bytes() == b"c" * 100
    assert stat.S_IMODE(before.stat().st_mode) == 0o600
    os.close(fd)


def test_without_room_for_the_copy_the_log_is_emptied_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_files, "_copy", full)
    log = tmp_path / "w.log"
    log.write_bytes(b"x" * 200)
    bound(log, most_bytes=100)
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("w.log", 0)]


def test_a_log_that_is_not_there_and_a_link_beside_one_harm_nothing(tmp_path: Path) -> None:
    bound(tmp_path / "none.log", most_bytes=0)
    other, log = tmp_path / "other", tmp_path / "w.log"
    other.write_bytes(b"precious")
    log.write_bytes(b"x" * 200)
    (tmp_path / "w.log.1").symlink_to(other)
    bound(log, most_bytes=100)
    assert other.read_bytes() == b"precious"


def test_a_node_bounds_the_logs_of_its_own_processes(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    names = ("sidecar-n0.log", "sidecar-n1.log", "trainer-0.log", "trainer-1.log")
    for name in names:
        (logs / name).write_bytes(b"x" * 20)
    reporter = Reporter(tmp_path, node="n0", history_bytes=20)
    reporter.bound_logs(["trainer/1"])
    reporter.close()
    assert [(logs / name).stat().st_size for name in names] == [0, 20, 20, 0]
