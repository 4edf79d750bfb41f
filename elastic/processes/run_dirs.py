"""Run directories that nobody asked for: made for one job, and gone after it, whatever ends it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK = "lock"
_PREFIX = "holdfast-"
_MARK = "temporary"


def make() -> Path:
    """Make a directory in the system's directory for temporary files."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def mark(directory: Path) -> None:
    """Have the next job remove ``directory`` should this one not; its lock must be held."""
    (directory / _MARK).touch()


def sweep() -> None:
    """Remove what launchers that were killed left: directories with a mark whose lock is free."""
    for marked in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_MARK}"):
        with contextlib.suppress(OSError):  # in use, somebody else's, or swept by another just now
            fd = os.open(marked.parent / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(marked.parent)
            finally:
                os.close(fd)
