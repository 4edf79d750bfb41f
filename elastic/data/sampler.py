"""Assignment of samples to microbatches by a function of (seed, epoch, position). Pure.

An epoch is a permutation of the data set. A keyed Feistel network on as many bits as the size needs
computes it at the requested positions, with cycle walking back into the range (Black and Rogaway,
"Ciphers with arbitrary finite domains"; many cheap rounds as in Mitchell, Stokes, Frank and Holmes,
"Bandwidth-optimal random shuffling for GPUs"). No list of indices is stored, so a billion samples
need no memory, and any rank can compute any position.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 16
_LIMIT = 1 << 62

# Increment and multipliers of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom
# number generators"), whose finalizer is the round function.
_MIX = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
_SHIFTS = np.array([30, 27, 31], dtype=np.uint64)


def keys(count: int, *name: object) -> NDArray[np.uint64]:
    """Return ``count`` keys of 64 bits that belong to ``name``."""
    text = "\0".join(map(str, name))
    parts = [
        hashlib.blake2b(f"{text}\0{turn}".encode(), digest_size=8).digest() for turn in range(count)
    ]
    return np.frombuffer(b"".join(parts), dtype="<u8").astype(np.uint64)


def mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return 64 pseudo-random bits for each of ``values``; every key gives different ones."""
    mixed: NDArray[np.uint64] = values + key
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MIX[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


class Permutation:
    """The order in which an epoch visits ``size`` samples: a bijection on ``range(size)``."""

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        if not 1 <= size <= _LIMIT:
            raise ValueError(f"a permutation of {size} samples: give 1 to {_LIMIT}")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        low = bits // 2
        self._low = np.uint64(low)
        self._low_mask = np.uint64((1 << low) - 1)
        self._high_mask = np.uint64((1 << (bits - low)) - 1)
        self._keys = keys(_ROUNDS, seed, epoch)

    def __getitem__(self, position: int) -> int:
        """Return the sample at ``position`` of the epoch."""
        return int(self.at(range(position, position + 1))[0])

    def at(self, positions: range) -> NDArray[np.int64]:
        """Return the samples at ``positions``. Raises ``IndexError`` outside the epoch."""
        if len(positions) and not (0 <= positions[0] < self.size and positions[-1] < self.size):
            raise IndexError(f"{positions} is outside an epoch of {self.size} samples")
        values = self._encrypt(np.arange(positions.start, positions.stop, dtype=np.uint64))
        size = np.uint64(self.size)
        outside = np.flatnonzero(values >= size)
        while outside.size:  # the domain is less than twice as large: fewer than two turns each
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= size]
        return values.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = values >> self._low, values & self._low_mask
        for turn in range(0, _ROUNDS, 2):
            high = high ^ (mix(low, self._keys[turn]) & self._high_mask)
            low = low ^ (mix(high, self._keys[turn + 1]) & self._low_mask)
        return high << self._low | low


def positions(*, step: int, microbatch: int, microbatches: int, size: int) -> range:
    """Return a microbatch's positions in the endless sequence of samples."""
    start = (step * microbatches + microbatch) * size
    return range(start, start + size)


def sample_indices(wanted: range, *, samples: int, seed: int) -> list[int]:
    """Return the data-set indices at the ``wanted`` positions.

    Epochs follow each other directly.
    """
    indices: list[int] = []
    position = wanted.start
    while position < wanted.stop:
        epoch, offset = divmod(position, samples)
        count = min(wanted.stop - position, samples - offset)
        order = Permutation(samples, seed=seed, epoch=epoch)
        indices += order.at(range(offset, offset + count)).tolist()
        position += count
    return indices
