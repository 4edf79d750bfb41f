"""The time until which a node's memory stays although no process holds it.

A process that holds an arena's directory for a job that may come back writes it there again and
again. So the memory outlives a SIGKILL of every process at once, and goes with the first sweep
after that time. The time counts from the machine's boot: its memory does not outlive that either,
and nobody sets that clock.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from holdfast.ckpt.private import is_private

_FILE = "kept"


def keep(directory: Path, *, seconds: float) -> None:
    """Let the directory stay for so many seconds.

    Does nothing if the directory is not ours alone, or has no room for the file.
    """
    if not is_private(directory):
        return
    until_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(seconds * 1e9)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        fd = os.open(directory / _FILE, flags, 0o600)
        try:
            os.pwrite(fd, b"%020d" % until_ns, 0)  # in one call, and of one length
        finally:
            os.close(fd)


def give_up(directory: Path) -> None:
    """Let the directory go with the last process that holds it."""
    if is_private(directory):
        (directory / _FILE).unlink(missing_ok=True)


def is_kept(directory: Path) -> bool:
    """Return whether the directory stays without a holder now."""
    try:
        until_ns = int((directory / _FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) < until_ns
