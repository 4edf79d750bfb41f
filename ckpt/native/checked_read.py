"""Reading of a file into memory with the checksums of its blocks, in one call outside the GIL.

Every block is checksummed while it is in the cache, and threads that read do not wait for the
interpreter in between. `_stream.c` does the work.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import numpy as np

from holdfast.ckpt.native import crc, isal
from holdfast.ckpt.native.streaming import library


@functools.cache
def kernel() -> Any:
    """Return the compiled function, or None if there is none."""
    found = library()
    try:
        if found is None:
            return None
        read = found.checked_read
    except AttributeError:  # compiled from an earlier version of the source
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    read.argtypes = [ctypes.c_int, ctypes.c_int64, pointer, size, pointer, pointer]
    read.restype = ctypes.c_int64
    return read


def read_checked(file: int, at: int, into: memoryview) -> tuple[int, list[int]]:
    """Fill ``into`` from byte ``at`` of an open file.

    Returns the bytes read, fewer only where the file ends, and the CRC32C of each
    ``crc.BLOCK_BYTES`` of them. Raises ``OSError``. `kernel` must not be None.
    """
    sums = np.zeros(-(-into.nbytes // crc.BLOCK_BYTES), dtype=np.uint32)
    checksum = ctypes.cast(isal.library().crc32_iscsi, ctypes.c_void_p)
    got = kernel()(file, at, isal.address_of(into), into.nbytes, int(sums.ctypes.data), checksum)
    if got < 0:
        raise OSError(-got, os.strerror(-got))
    return got, sums[: -(-got // crc.BLOCK_BYTES)].tolist()
