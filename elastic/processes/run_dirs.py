"""Temporary run directories: made for one job, and removed after it, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from holdfast.ckpt.private import is_private

LOCK = "lock"
_PREFIX = "holdfast-"
_MARK = "temporary"


def make() -> Path:
    """Make a directory in the system's directory for temporary files."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def mark(directory: Path) -> None:
    """Mark ``directory`` for removal by the next job if this one does not; hold its lock."""
    (directory / _MARK).touch(mode=0o600)


def sweep() -> None:
    """Remove directories left by killed launchers: ours, with a mark and a free lock."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not is_private(directory) or not (directory / _MARK).exists():
            continue
        with contextlib.suppress(OSError):  # in use, or just removed by another job
            fd = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(fd)
