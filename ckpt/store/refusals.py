"""Errors of the file system as errors of a store, each with the path and a remedy that fits it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.ckpt.errors import NotFoundError, StoreError

_ROOM: Final = "make room there or choose another place; nothing committed before is harmed"
_WRITING: Final = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or choose another file system",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "change the permissions or choose a place that can be written",
    errno.EPERM: "change the permissions or choose a place that can be written",
    errno.EISDIR: "a file was needed there: choose another path",
    errno.EIO: "the disk fails: choose another place",
}
_READING: Final = {
    errno.EACCES: "give this user the right to read it, or run as its owner",
    errno.EPERM: "give this user the right to read it, or run as its owner",
    errno.EISDIR: "a file was needed there: check the path",
    errno.EIO: "the disk fails: restore it from a copy",
    errno.ESTALE: "the server of this file system lost it: mount it again",
}
_BOTH: Final = {
    errno.EEXIST: "a file is in the way: remove it or choose another place",
    errno.ENOTDIR: "a part of the path is a file: check it or choose another place",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "links lead in a circle: check the path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine: close some",
    errno.ENOMEM: "free memory, and try again",
}


def remedy_of(error: OSError, *, reading: bool = False) -> str:
    """Return what to do about a fault of writing, or of ``reading``."""
    found = (_READING if reading else _WRITING) | _BOTH
    return found.get(error.errno or 0, "see the system's message and try again")


@contextlib.contextmanager
def refusals(path: Path, doing: str, *, reading: bool = False) -> Iterator[None]:
    """Turn system errors into ``StoreError`` with the path and a remedy.

    A path that is not there is a ``NotFoundError``.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: not there (cannot {doing}); check the path") from error
    except OSError as error:
        raise StoreError(
            f"{path}: cannot {doing}: {error.strerror or error}; "
            f"{remedy_of(error, reading=reading)}"
        ) from error
