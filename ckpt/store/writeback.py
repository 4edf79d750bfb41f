"""Have the kernel start writing to the disk what was just written to a file.

Without this, nothing is sent to the disk before ``fsync``, which then has all of it to wait for.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Final

_START: Final = 2
"""``SYNC_FILE_RANGE_WRITE`` of Linux: start, do not wait."""


@functools.cache
def _call() -> Callable[[int, int, int, int], int] | None:
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None  # not Linux
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def start(fd: int, at: int, nbytes: int) -> None:
    """Start writing a range of an open file; a hint, which may be refused without harm."""
    if nbytes and (call := _call()) is not None:
        call(fd, at, nbytes, _START)
