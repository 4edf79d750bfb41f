"""Recording of a stuck job's stacks before its processes are ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast.elastic.agent.stacks import kernel_state
from holdfast.tools.chaos.real.jobs import alive

STACKS: Final = "stacks.txt"
_SPY_S: Final = 10.0
_ABORT_S: Final = 2.0
_TICK_S: Final = 0.02


def write_stacks(pids: Sequence[int], folder: Path) -> str:
    """Write the stacks of processes into a folder; return a sentence that says where they are.

    py-spy writes them if it is installed and permitted. All other processes get SIGABRT: Python's
    faulthandler, which the job's environment turned on, then writes their stacks to their output.
    """
    texts, silent = [], []
    for pid in alive(pids):
        found = spied(pid)
        texts.append(f"process {pid} ({kernel_state(pid) or 'gone'})\n{found or '  aborted'}\n")
        if not found:
            silent.append(pid)
    if texts:
        (folder / STACKS).write_text("\n".join(texts))
    if silent:
        _abort(silent)
        return "the stacks are at the end of its processes' output"
    return f"the stacks are in {folder / STACKS}" if texts else "none of its workers lives"


def spied(pid: int) -> str:
    """Return the stacks of a process as py-spy tells them; "" without py-spy or permission."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return ""
    argv = [program, "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        found = subprocess.run(argv, capture_output=True, text=True, timeout=_SPY_S, check=False)
        return found.stdout if not found.returncode else ""
    return ""


def _abort(pids: Sequence[int]) -> None:
    """End processes one after the other: they may share a file, and each stack has many writes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGABRT)
        until_s = time.monotonic() + _ABORT_S
        while alive([pid]) and time.monotonic() < until_s:
            time.sleep(_TICK_S)
