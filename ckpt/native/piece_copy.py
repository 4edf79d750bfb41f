"""Copy of a piece of a pack to its destination, part by part, with checksums on the way.

A pack has two checksums of every piece: CRC32C by blocks, and CRC-64/NVME of the whole. Here they
are computed in one pass over the very bytes that are stored, so that persisted bytes are read once.
`_stream.c` does the work. Without it, or on a processor without wide carry-less products, several
passes over blocks that stay in the cache replace it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from holdfast.ckpt.native import crc, isal
from holdfast.ckpt.native.streaming import folding

_WHOLE = 0xFFFFFFFF


@functools.cache
def kernel() -> Any:
    """Return the compiled function that copies and checksums, or None if there is none."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return folding("checked_copy", pointer, pointer, size, size, pointer, pointer)


class PieceCopy:
    """The bytes of ``source``, copied once, in order; afterwards their checksums are known.

    ``source`` is contiguous and not empty.
    """

    __slots__ = ("_at", "_blocks", "_crc64", "_source", "_start", "nbytes")

    def __init__(self, source: memoryview) -> None:
        self.nbytes = source.nbytes
        self._source, self._start, self._at = source, isal.address_of(source), 0
        self._blocks = (ctypes.c_uint32 * -(-self.nbytes // crc.BLOCK_BYTES))()
        self._crc64 = ctypes.c_uint64()

    def pour(self, target: int, nbytes: int) -> None:
        """Copy the next ``nbytes`` to the address ``target``."""
        if nbytes > self.nbytes - self._at:
            raise ValueError(f"{nbytes} bytes are wanted, {self.nbytes - self._at} are left")
        pour = kernel() or _pour
        pour(
            target,
            self._start + self._at,
            nbytes,
            self._at,
            self._blocks,
            ctypes.byref(self._crc64),
        )
        self._at += nbytes

    def sums(self) -> tuple[list[int], int]:
        """Return the CRC32C of each ``crc.BLOCK_BYTES``, and the CRC-64/NVME of the whole."""
        if self._at != self.nbytes:
            raise ValueError(f"{self._at} of {self.nbytes} bytes were copied")
        return list(self._blocks), self._crc64.value


def _pour(
    target: int,
    source: int,
    nbytes: int,
    at: int,
    blocks: ctypes.Array[ctypes.c_uint32],
    crc64: Any,
) -> None:
    """Do the work of the compiled function, block by block."""
    checksum, whole = isal.library().crc32_iscsi, crc64._obj
    while nbytes:
        block, before = divmod(at, crc.BLOCK_BYTES)
        size = min(nbytes, crc.BLOCK_BYTES - before)
        ctypes.memmove(target, source, size)
        blocks[block] = checksum(target, size, blocks[block] ^ _WHOLE) ^ _WHOLE
        whole.value = isal.crc64_at(target, size, whole.value)
        target, source, at, nbytes = target + size, source + size, at + size, nbytes - size
