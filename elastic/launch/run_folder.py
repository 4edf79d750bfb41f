"""The run directory of a launcher: made private, locked, and cleared of an earlier run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from holdfast.ckpt.private import make_private
from holdfast.elastic.agent.reporting import PROCESSES_PATTERN
from holdfast.elastic.coordinator.service import JOURNAL, RECORD
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events.log import EVENTS_PATTERN
from holdfast.elastic.processes import run_dirs

KEY = "key.json"
"""File of the run's key, in the run directory."""


def lock_run_dir(run_dir: Path, *, temporary: bool) -> TextIO:
    """Make the run directory and lock it; return the lock, which ends when it is closed.

    Raises ``UnsafePathError`` if another user made it or can write to it, ``ConfigError`` if
    another job uses it or it cannot be written.
    """
    try:
        make_private(run_dir)  # its key and its coordinator's record are trusted
        make_private(run_dir / "logs")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.fdopen(os.open(run_dir / run_dirs.LOCK, flags, 0o600), "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if temporary:
            run_dirs.mark(run_dir)
    except BlockingIOError:
        raise ConfigError(
            f"run directory {run_dir}: another job uses it; choose another directory"
        ) from None
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    return lock


def clear_run_dir(run_dir: Path) -> None:
    """Remove the files of an earlier run. Raises ``ConfigError``."""
    try:
        for pattern in (EVENTS_PATTERN, PROCESSES_PATTERN, KEY, RECORD, JOURNAL):
            for stale in run_dir.glob(pattern):
                stale.unlink()
    except OSError as error:
        raise _unwritable(run_dir, error) from error


def _unwritable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run directory {run_dir}: {error.strerror}; choose one that can be written")
