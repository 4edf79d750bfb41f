"""The name of a forked process on its command line, by which others find the processes of a run."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

OPTION: Final = "--name"
ROOM: Final = 96
"""Bytes of a name; what is longer loses its end."""

_ARG_START: Final = 45
"""The place of ``arg_start`` in ``/proc/PID/stat``, counted from the field behind ``comm``."""


def padded(name: str) -> str:
    """Return a name that leaves room for any other."""
    return name.ljust(ROOM)


def retitle(name: str) -> None:
    """Show ``name`` on this process's command line, in the place of its `padded` one.

    The kernel reads command lines in the memory in which the process began. Does nothing where it
    does not tell the place.
    """
    line = Path("/proc/self/cmdline").read_bytes()
    stat = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    start, before = int(stat[_ARG_START]), f"\0{OPTION}\0".encode()
    if not start or before not in line:
        return
    at = line.index(before) + len(before)
    if line.find(b"\0", at) - at < ROOM:
        return
    ctypes.memmove(start + at, name.encode()[:ROOM].ljust(ROOM), ROOM)
