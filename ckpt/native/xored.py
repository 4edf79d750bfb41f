"""The exclusive or of some runs of memory with checksums, in one pass and past the cache.

It is the parity of a code with one row, and what rebuilds a lost column of it. `_stream.c` does the
work; without it, or on a processor without wide carry-less products, there is no such function.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.ckpt.native.streaming import folding
from holdfast.ckpt.native.sums import Lengths, Sums


@functools.cache
def kernel() -> Any:
    """Return the compiled function, or None if there is none."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return folding("stream_xor", pointer, size, pointer, size, pointer, pointer)


def xor_runs(sources: Sequence[int], target: int, stops: Lengths) -> Sums:
    """Overwrite bytes ``stops[0] … stops[-1]`` of the target with the exclusive or of all sources.

    ``sources`` and ``target`` are addresses; the target may be one of the sources. The caller keeps
    the memory alive. Returns the CRC32C of the bytes between neighbouring ``stops``. `kernel` must
    not be None.
    """
    sums = np.zeros(len(stops) - 1, dtype=np.uint32)
    words = np.ascontiguousarray(stops, dtype=np.uint64)
    inputs = (ctypes.c_uint64 * len(sources))(*sources)
    kernel()(target, len(sources), inputs, len(sums), int(words.ctypes.data), int(sums.ctypes.data))
    return sums
