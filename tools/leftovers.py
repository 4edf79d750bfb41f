"""Search for a run's leftovers after its end: processes and shared memory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_SHM = Path("/dev/shm")
_PROC = Path("/proc")


def processes_of(run: str) -> list[int]:
    """Return the processes, except this one, whose command line or environment names ``run``."""
    needle = run.encode()
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if needle in text and not _is_zombie(entry):
                found.append(int(entry.name))
    return sorted(found)


def _is_zombie(entry: Path) -> bool:
    return b") Z" in (entry / "stat").read_bytes()


def memory_of(run: str) -> list[str]:
    """Return the names in /dev/shm that contain ``run``."""
    return sorted(path.name for path in _SHM.iterdir() if run in path.name)


def leftovers(run: str, *, timeout_s: float = 3.0) -> list[str]:
    """Return the leftovers of ``run``: as soon as there are none, or those after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left = [f"process {pid}: {_command(pid)}" for pid in processes_of(run)]
        left += [f"shared memory /dev/shm/{name}" for name in memory_of(run)]
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.05)


def _command(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return b" ".join(words).decode(errors="replace")[:120]
