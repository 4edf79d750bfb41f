"""Sampling noise as a pure function of a token's position; there is no generator state.

The uniform number that picks a token is a hash of (seed, ordinal, sample, position). Every process
that samples that token, at any time and after any interruption, draws the same number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SAMPLE = np.uint64(0xD1B54A32D192ED03)
_POSITION = np.uint64(0x8CB92BA72F3D8DD7)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(
    seed: int, ordinal: NDArray[np.int64], sample: NDArray[np.int64], position: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return numbers in [0, 1), one per (ordinal, sample, position), by SplitMix64 hashing."""
    with np.errstate(over="ignore"):
        state = _mix(np.uint64(seed) + ordinal.astype(np.uint64) * _GOLDEN)
        state = _mix(state + sample.astype(np.uint64) * _SAMPLE)
        state = _mix(state + position.astype(np.uint64) * _POSITION)
    return (state >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def choose(logits: NDArray[np.float32], noise: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return, for each row of ``logits`` [rows, vocabulary], the token that ``noise`` [rows] picks.

    Inverse transform sampling at temperature 1, in float64 and row by row, so that a row's result
    depends on nothing but the row.
    """
    wide = logits.astype(np.float64)
    weights = np.exp(wide - wide.max(axis=1, keepdims=True))
    cumulative = np.cumsum(weights, axis=1)
    below = cumulative <= (noise * cumulative[:, -1])[:, None]
    picked: NDArray[np.int64] = np.minimum(below.sum(axis=1), logits.shape[1] - 1)
    return picked


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
