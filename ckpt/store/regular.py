"""Opening of files that somebody else may have put there.

A pipe stops its reader for ever, a device has no end, a sparse file costs its writer nothing. So
such a file is opened without waiting, must be a regular one, and is not read into memory beyond a
limit.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO, Final

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.store.refusals import refusals

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def open_regular(path: Path, *, most_bytes: int | None = None) -> tuple[int, int]:
    """Open a file for reading; return the descriptor and the size in bytes.

    Raises ``NotFoundError``, ``StoreError`` if it cannot be opened, and ``CorruptError`` if it is
    not a regular file, or larger than ``most_bytes``.
    """
    with refusals(path, "open it for reading", reading=True):
        fd = os.open(path, _FLAGS)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptError(f"{path}: it is not a regular file; restore the original")
        check_size(str(path), found.st_size, most_bytes=most_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd, found.st_size


def check_size(where: str, nbytes: int, *, most_bytes: int | None) -> None:
    """Raise ``CorruptError`` for a file that is larger than any of its kind."""
    if most_bytes is not None and nbytes > most_bytes:
        raise CorruptError(
            f"{where}: {nbytes} bytes, such a file has at most {most_bytes}; restore the original"
        )


def opened(path: Path, *, most_bytes: int | None = None) -> IO[bytes]:
    """Open a file as a Python file. Raises as `open_regular`."""
    return os.fdopen(open_regular(path, most_bytes=most_bytes)[0], "rb")


def read_regular(path: Path, *, most_bytes: int) -> bytes:
    """Return a whole file. Raises as `open_regular`."""
    with opened(path, most_bytes=most_bytes) as file, refusals(path, "read it", reading=True):
        return file.read(most_bytes)
