"""Copy of memory with a checksum in one pass, past the cache and outside the GIL.

`_stream.c` does the work; it is compiled when the package is installed. Without it, or on a
processor that it does not support, two passes over blocks that fit into the cache replace it, at
about half the speed.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from holdfast.ckpt.native import isal
from holdfast.ckpt.native.sums import Sums

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]

_LIBRARY: Final = Path(__file__).with_name("_stream.so")
_BLOCK_BYTES: Final = 512 << 10
_START: Final = 0xFFFFFFFF


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library compiled from `_stream.c`, or None if it was not compiled."""
    try:
        return ctypes.CDLL(str(_LIBRARY))
    except OSError:
        return None


def folding(name: str, *types: Any) -> Any:
    """Return a compiled function of the library that folds checksums, with its argument types.

    None if there is no library, if it was compiled from a source without that function, or if the
    processor lacks wide carry-less products.
    """
    found = library()
    try:
        if found is None or not found.checked_prepare():
            return None
        function = getattr(found, name)
    except AttributeError:  # compiled from an earlier version of the source
        return None
    function.argtypes, function.restype = types, None
    return function


@functools.cache
def kernel() -> Any:
    """Return the compiled function that copies runs, or None if there is none."""
    found = library()
    if found is None or not found.stream_prepare():
        return None
    copy = found.stream_copy
    copy.argtypes, copy.restype = [ctypes.c_size_t, *[ctypes.c_void_p] * 4], None
    return copy


class MemoryRuns:
    """Runs of memory, copied some at a time; ``sums`` holds the CRC32C of the copied ones.

    ``sources`` and ``targets`` are addresses; the three arrays are of one length. The caller keeps
    the memory alive; no target overlaps another run.
    """

    def __init__(self, sources: Words, targets: Words, sizes: Words) -> None:
        self.sums = np.empty(len(sizes), dtype=np.uint32)
        self._words: list[Words] = [
            np.ascontiguousarray(each, dtype=np.uint64) for each in (sources, targets, sizes)
        ]
        self._at = [*(int(each.ctypes.data) for each in self._words), int(self.sums.ctypes.data)]

    def copy(self, first: int, last: int) -> None:
        """Copy the runs ``first … last-1``."""
        if (copy := kernel()) is not None:
            sources, targets, sizes, sums = self._at
            behind = 8 * first
            copy(last - first, sources + behind, targets + behind, sizes + behind, sums + 4 * first)
            return
        runs = [each[first:last].tolist() for each in self._words]
        self.sums[first:last] = np.fromiter(map(_copy, *runs), np.uint32, count=last - first)


def copy_runs(sources: Words, targets: Words, sizes: Words) -> Sums:
    """Copy runs of memory, all at once (see `MemoryRuns`); return the CRC32C of each."""
    runs = MemoryRuns(sources, targets, sizes)
    runs.copy(0, len(sizes))
    return runs.sums


def copy_run(source: int, target: int, nbytes: int) -> int:
    """Copy one run of memory; return its CRC32C."""
    if (copy := kernel()) is None:
        return _copy(source, target, nbytes)
    words, crc = (ctypes.c_uint64 * 3)(source, target, nbytes), ctypes.c_uint32()
    at = ctypes.addressof(words)
    copy(1, at, at + 8, at + 16, ctypes.addressof(crc))
    return crc.value


def sums_of_runs(addresses: Words, sizes: Words) -> Sums:
    """Return the CRC32C of runs of memory."""
    found = map(isal.crc32c_at, addresses.tolist(), sizes.tolist())
    return np.fromiter(found, dtype=np.uint32, count=len(sizes))


def _copy(source: int, target: int, nbytes: int) -> int:
    crc, checksum = _START, isal.library().crc32_iscsi
    for at in range(0, nbytes, _BLOCK_BYTES):
        size = min(_BLOCK_BYTES, nbytes - at)
        ctypes.memmove(target + at, source + at, size)
        crc = checksum(target + at, size, crc)
    return int(crc) ^ _START
