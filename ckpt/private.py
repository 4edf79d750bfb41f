"""Directories in places that others can write to, such as /dev/shm and /tmp.

Anybody can create a directory there first, under a name that they can guess. So each one is looked
at before it is used: it is a directory, no link, it belongs to this user, and nobody else can write
to it. The system then keeps others from replacing it (the sticky bit of the place), so that paths
below it can be trusted.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from holdfast.ckpt.errors import UnsafePathError

PRIVATE: Final = 0o700
"""The mode of a directory that only its user may enter."""

_OTHERS_WRITE: Final = 0o022
_MAX_NAME: Final = 200


def make_private(path: Path) -> None:
    """Make a directory that only this user may enter, or check one that exists.

    Raises ``UnsafePathError`` if something else is there, and ``OSError`` where it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=PRIVATE)
    except FileExistsError:
        check_private(path)


def check_private(path: Path) -> None:
    """Raise ``UnsafePathError`` if another user made the directory or can write to it.

    One of this user's that others can only read is closed to them. Raises ``FileNotFoundError`` if
    nothing is there.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafePathError(f"{path}: not a directory; remove it, it may be somebody's trap")
    if found.st_uid != os.geteuid():
        raise UnsafePathError(
            f"{path}: belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}: have it removed, or choose another name or place"
        )
    if found.st_mode & _OTHERS_WRITE:
        raise UnsafePathError(
            f"{path}: others can write to it (mode {stat.S_IMODE(found.st_mode):04o}): remove it, "
            f"or look at what it contains and chmod 700 {path}"
        )
    if stat.S_IMODE(found.st_mode) != PRIVATE:
        path.chmod(PRIVATE)


def is_private(path: Path) -> bool:
    """Say whether `check_private` would let the directory pass; changes nothing."""
    try:
        found = path.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return ours and not found.st_mode & _OTHERS_WRITE


def plain_name(name: str, origin: str) -> str:
    """Return a name that can be a part of a path, such as a run's or a node's.

    Letters, digits and ``-_.`` are allowed, but not a dot at the beginning. Raises
    ``UnsafePathError`` that names ``origin``, where the name comes from.
    """
    if (
        not 0 < len(name) <= _MAX_NAME
        or name.startswith(".")
        or not all(char.isalnum() or char in "-_." for char in name)
    ):
        shown = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
        raise UnsafePathError(
            f"{origin} {shown!r}: give up to {_MAX_NAME} letters, digits, '-', '_' and '.', no '.' "
            "first"
        )
    return name
