"""Temporary run directories: made for one job, and removed after it, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from holdfast.ckpt.memory.arena import ARENA_ROOT
from holdfast.ckpt.private import is_private, make_private
from holdfast.elastic.errors import ConfigError

LOCK = "lock"
_PREFIX = "holdfast-"
_MARK = "temporary"
_LARGE = Path("/var/tmp")
_ENOUGH_BYTES = 1 << 30


def make() -> Path:
    """Make a directory for temporary files; raises ``ConfigError`` if there is no place for it.

    A small or full /tmp, often memory, gives way to /var/tmp unless ``TMPDIR`` names a place.
    """
    room = {place: _free_bytes(place) for place in _places()}
    if not room:
        raise ConfigError(
            "no directory for temporary files can be written: set TMPDIR, or give --run-dir DIR"
        )
    best = next((p for p, free in room.items() if free >= _ENOUGH_BYTES), None)
    best = best or max(room, key=room.__getitem__)
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=best))
    except OSError as error:
        raise ConfigError(
            f"{best}: no directory for events and logs can be made ({error.strerror}): give "
            "--run-dir DIR"
        ) from error


def temporary_place() -> Path:
    """Return the usual place of temporary files, or shared memory if no disk can be written."""
    return next(iter(_places()), ARENA_ROOT)


def environment(run_dir: Path) -> dict[str, str]:
    """Return the variables by which workers keep temporary files in the run directory.

    There are none if the usual place can be written. Without any place torch cannot be imported.
    """
    if _places():
        return {}
    own = run_dir.absolute() / "tmp"
    make_private(own)
    return {"TMPDIR": str(own)}


def _places() -> list[Path]:
    try:
        usual = Path(tempfile.gettempdir())
    except FileNotFoundError:  # none can be written
        return []
    return [usual] if os.environ.get("TMPDIR") else [*dict.fromkeys((usual, _LARGE))]


def _free_bytes(place: Path) -> int:
    try:
        return shutil.disk_usage(place).free if os.access(place, os.W_OK) else -1
    except OSError:
        return -1


def mark(directory: Path) -> None:
    """Mark ``directory`` for removal by the next job if this one does not; hold its lock."""
    (directory / _MARK).touch(mode=0o600)


def sweep() -> None:
    """Remove directories left by killed launchers: ours, with a mark and a free lock."""
    for directory in (found for place in _places() for found in place.glob(f"{_PREFIX}*")):
        if not is_private(directory) or not (directory / _MARK).exists():
            continue
        with contextlib.suppress(OSError):  # in use, or just removed by another job
            fd = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(fd)
