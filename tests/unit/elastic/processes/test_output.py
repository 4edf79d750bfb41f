"""A process that prints to a full disk goes on; what is lost is counted."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.elastic.processes.children import Child
from holdfast.elastic.processes.output import OutputCopy

WAIT_S = 60.0


def test_what_a_process_prints_arrives_in_the_file_before_its_end_is_told(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("before\n")
    child = Child.start(
        (sys.executable, "-c", "print('x' * 300_000); raise SystemExit('why')"),
        env=os.environ,
        tied=False,
        output=log,
        copied=True,
    )
    assert child.wait(WAIT_S) == 1
    assert log.read_text() == f"before\n{'x' * 300_000}\nwhy\n"


def test_a_process_that_prints_nothing_has_a_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    child = Child.start(
        (sys.executable, "-c", ""), env=os.environ, tied=False, output=log, copied=True
    )
    assert child.wait(WAIT_S) == 0
    assert log.read_bytes() == b""


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_costs_output_and_the_count_stands_in_its_place(
    room: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "worker.log"
    log.write_bytes(b"whole\n")
    copy, (soft, hard) = OutputCopy(log), resource.getrlimit(resource.RLIMIT_FSIZE)
    mine = os.dup(copy.fd)
    copy.begin()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + room, hard))
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=mine) as cat:
            assert cat.stdin is not None
            cat.stdin.write(b"l" * 1000)
        while not caplog.messages:
            time.sleep(0.001)
        assert log.read_bytes() == b"whole\n"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    os.write(mine, b"again\n")
    os.close(mine)
    copy.finish(WAIT_S)
    whole, empty, lost, again = log.read_text().splitlines()
    assert (whole, empty, again) == ("whole", "", "again")
    assert lost == "[holdfast: bytes of output lost here: 1000]"
    assert "output is lost" in caplog.text


def test_output_that_no_file_takes_is_counted_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = OutputCopy(tmp_path / "no such folder" / "worker.log")
    mine = os.dup(copy.fd)
    copy.begin()
    os.write(mine, b"l" * 1000)
    os.close(mine)
    copy.finish(WAIT_S)
    first, last = caplog.messages
    assert "output is lost: No such file" in first
    assert "bytes of output lost: 1000" in last
