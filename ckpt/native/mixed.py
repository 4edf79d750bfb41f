"""Combinations of runs of memory over GF(256) with checksums, in one pass and past the cache.

They are the parity rows of a code with several, and what rebuilds its lost columns. `_stream.c`
does the work; without it, or on a processor without Galois field instructions of 64 bytes, there is
no such function.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.ckpt.native import isal
from holdfast.ckpt.native.streaming import folding, library
from holdfast.ckpt.native.sums import Lengths, Sums


@functools.cache
def kernel() -> Any:
    """Return the compiled function, or None if there is none."""
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    types = (size, pointer, size, pointer, pointer, size, pointer, pointer)
    return folding("stream_combine", *types) if most_inputs() else None


@functools.cache
def most_inputs() -> int:
    """Return the number of inputs that the compiled function takes at most; 0 without it."""
    found = library()
    try:
        return int(found.combine_prepare()) if found is not None else 0
    except AttributeError:  # compiled from an earlier version of the source
        return 0


def combine_runs(
    coefficients: isal.Bytes, sources: Sequence[int], targets: Sequence[int], stops: Lengths
) -> Sums:
    """Overwrite bytes ``stops[0] … stops[-1]`` of each target with its combination of the sources.

    ``coefficients`` has the shape (targets, sources), at most `most_inputs` of these. ``sources``
    and ``targets`` are addresses; no target may be a source, or overlap another target. The caller
    keeps the memory alive. Returns the CRC32C of the bytes between neighbouring ``stops``, for each
    target. Raises ``ValueError`` for coefficients of another shape. `kernel` must not be None.
    """
    shape = (len(targets), len(sources))
    if coefficients.shape != shape or len(sources) > most_inputs():
        raise ValueError(f"coefficients of shape {coefficients.shape} for {shape} runs of memory")
    sums = np.zeros((len(targets), len(stops) - 1), dtype=np.uint32)
    words = np.ascontiguousarray(stops, dtype=np.uint64)
    factors = np.ascontiguousarray(coefficients, dtype=np.uint8)
    inputs = (ctypes.c_uint64 * len(sources))(*sources)
    outputs = (ctypes.c_uint64 * len(targets))(*targets)
    kernel()(
        len(targets),
        outputs,
        len(sources),
        inputs,
        int(factors.ctypes.data),
        len(stops) - 1,
        int(words.ctypes.data),
        int(sums.ctypes.data),
    )
    return sums
