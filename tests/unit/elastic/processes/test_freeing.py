"""The memory of a dead process is freed at a lower priority, unless memory is scarce."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.elastic.processes.freeing import NICE, yield_freeing

_TWO_THREADS = (
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); "
    "print(flush=True); threading.Event().wait()"
)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-S", "-c", _TWO_THREADS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.kill()


def meminfo(directory: Path, *, available: int) -> Path:
    path = directory / "meminfo"
    path.write_text(f"MemTotal:  100 kB\nMemFree:   7 kB\nMemAvailable:   {available} kB\n")
    return path


def priorities(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks}


def test_all_its_threads_yield(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 2
    yield_freeing(process.pid, meminfo=meminfo(tmp_path, available=50))
    assert priorities(process.pid) == {NICE}


def test_scarce_memory_is_freed_at_once(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    before = priorities(process.pid)
    yield_freeing(process.pid, meminfo=meminfo(tmp_path, available=49))
    yield_freeing(process.pid, meminfo=tmp_path / "none")
    assert priorities(process.pid) == before


def test_a_process_that_is_gone_needs_nothing(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process.kill()
    process.wait()
    yield_freeing(process.pid, meminfo=meminfo(tmp_path, available=50))
