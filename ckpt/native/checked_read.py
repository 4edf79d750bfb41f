"""Reading of files into memory with the checksums of their blocks, in calls outside the GIL.

Every block is checksummed while it is in the cache, and threads that read do not wait for the
interpreter in between. `_stream.c` does the work: of one run of a file, or of many pieces of it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Any, Final, TypeAlias

import numpy as np

from holdfast.ckpt.native import crc, isal, streaming
from holdfast.ckpt.native.sums import Sums

FIELDS: Final = ("at", "size", "to", "first", "last", "tail", "rest")
"""The columns of `Pieces`, in bytes and addresses.

``size`` bytes of the file from ``at`` on are cut into blocks. Of them, bytes ``first … last`` are
wanted at the address ``to``; the others are only checksummed. The ``rest`` bytes that follow in the
file go to the address ``tail``, without a checksum.
"""

Pieces: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""Pieces of a file: shape (pieces, 7), the columns being `FIELDS`."""


@functools.cache
def kernel() -> Any:
    """Return the compiled function that reads one run, or None if there is none."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    types = [ctypes.c_int, ctypes.c_int64, pointer, size, pointer, pointer]
    return _compiled("checked_read", types, ctypes.c_int64)


@functools.cache
def pieces_kernel() -> Any:
    """Return the compiled function that reads many pieces, or None if there is none."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    types = [ctypes.c_int, size, pointer, pointer, pointer, pointer, pointer]
    streaming.kernel()  # prepares the copy of what the page cache has
    return _compiled("checked_pieces", types, size)


def _compiled(name: str, types: list[Any], result: Any) -> Any:
    found = streaming.library()
    try:
        if found is None:
            return None
        function = getattr(found, name)
    except AttributeError:  # compiled from an earlier version of the source
        return None
    function.argtypes, function.restype = types, result
    return function


def read_checked(file: int, at: int, into: memoryview) -> tuple[int, list[int]]:
    """Fill ``into`` from byte ``at`` of an open file.

    Returns the bytes read, fewer only where the file ends, and the CRC32C of each
    ``crc.BLOCK_BYTES`` of them. Raises ``OSError``. `kernel` must not be None.
    """
    sums = np.zeros(-(-into.nbytes // crc.BLOCK_BYTES), dtype=np.uint32)
    address = isal.address_of(into)
    got = kernel()(file, at, address, into.nbytes, int(sums.ctypes.data), _checksum())
    if got < 0:
        raise OSError(-got, os.strerror(-got))
    return got, sums[: -(-got // crc.BLOCK_BYTES)].tolist()


def read_pieces(file: int, pieces: Pieces) -> tuple[Sums, int, int]:
    """Read pieces of an open file; the caller keeps their memory alive.

    Returns the CRC32C of each ``crc.BLOCK_BYTES`` of each piece, one piece after the other; the
    number of pieces that were read to their ends; and the bytes read of the next one, where the
    file ends. Raises ``OSError``, and ``ValueError`` for pieces that cannot be. `pieces_kernel`
    must not be None.
    """
    table = np.ascontiguousarray(pieces, dtype=np.int64)
    size, first, last = (table[:, FIELDS.index(name)] for name in ("size", "first", "last"))
    if (table < 0).any() or (first > last).any() or (last > size).any():
        raise ValueError("a piece has a negative number, or more of it is wanted than it has")
    blocks = -(-size // crc.BLOCK_BYTES)
    sums, found = np.zeros(int(blocks.sum()), dtype=np.uint32), ctypes.c_int64()
    done = pieces_kernel()(
        file,
        len(table),
        int(table.ctypes.data),
        _scratch.block,
        int(sums.ctypes.data),
        _checksum(),
        ctypes.addressof(found),
    )
    if done < len(table) and found.value < 0:
        raise OSError(-found.value, os.strerror(-found.value))
    return sums, int(done), found.value


@functools.cache
def _checksum() -> ctypes.c_void_p:
    return ctypes.cast(isal.library().crc32_iscsi, ctypes.c_void_p)


class _BlockScratch(threading.local):
    """A thread's room for a block of which only a part is wanted, as an address."""

    def __init__(self) -> None:
        self._memory = np.empty(crc.BLOCK_BYTES, dtype=np.uint8)
        self.block = int(self._memory.ctypes.data)


_scratch = _BlockScratch()
