"""A process that prints to a full disk goes on; what is lost is counted."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.elastic.processes.children import Child
from holdfast.elastic.processes.output import OutputCopy, stamp

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


STAMPED = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        (["one\n", "two\nthree\n"], ["one", "two", "three"]),
        (["be", "gun\n", "\n", "torn"], ["begun", "", "torn"]),
        (["10 %\r", "20 %\r", "done\n"], ["10 %\r20 %\rdone"]),
    ],
    ids=["whole lines", "parts of lines", "a progress bar"],
)
def test_each_line_begins_with_its_time(
    tmp_path: Path, printed: list[str], lines: list[str]
) -> None:
    log = tmp_path / "worker.log"
    log.write_text("torn by a kill")
    copy = OutputCopy(log, stamped=True)
    mine = os.dup(copy.fd)
    copy.begin()
    seen_bytes = log.stat().st_size
    for part in printed:
        os.write(mine, part.encode())
        while log.stat().st_size < seen_bytes + len(part):
            time.sleep(0.001)
        seen_bytes = log.stat().st_size
    os.close(mine)
    copy.finish(WAIT_S)
    torn, *stamped = log.read_bytes().decode().removesuffix("\n").split("\n")
    assert torn == "torn by a kill"
    assert [re.sub(f"^{STAMPED}", "", line) for line in stamped] == lines
    assert all(re.match(STAMPED, line) for line in stamped)


def test_a_stamp_is_the_time_in_utc() -> None:
    assert stamp(1769851613.589) == b"2026-01-31T09:26:53.589Z "
