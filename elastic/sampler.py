"""Which samples belong to which microbatch: a pure function of (seed, epoch, index). Pure.

An epoch is a permutation of the data set, computed one index at a time by a keyed Feistel
network with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains"): no list
of indices is stored, and any rank can ask for any position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_ROUNDS = 4


class Permutation:
    """The order in which an epoch visits ``size`` samples: a bijection on ``range(size)``."""

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} samples is empty")
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        self._keys = [
            hashlib.blake2b(f"{seed}\0{epoch}\0{turn}".encode(), digest_size=16).digest()
            for turn in range(_ROUNDS)
        ]

    def __getitem__(self, position: int) -> int:
        """Return the sample at ``position`` of the epoch."""
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} is outside an epoch of {self.size} samples")
        value = self._encrypt(position)
        while value >= self.size:  # expected fewer than four turns: the domain is < 4 times larger
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for key in self._keys:
            digest = hashlib.blake2b(right.to_bytes(8, "little"), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & self._mask)
        return left << self._half_bits | right


def positions(*, step: int, microbatch: int, microbatches: int, size: int) -> range:
    """Return where in the endless sequence of samples a microbatch of ``size`` lies."""
    start = (step * microbatches + microbatch) * size
    return range(start, start + size)


def sample_indices(wanted: range, *, samples: int, seed: int) -> list[int]:
    """Return the data-set indices at the ``wanted`` positions; epochs follow without a gap."""
    orders: dict[int, Permutation] = {}
    indices = []
    for position in wanted:
        epoch, offset = divmod(position, samples)
        if epoch not in orders:
            orders[epoch] = Permutation(samples, seed=seed, epoch=epoch)
        indices.append(orders[epoch][offset])
    return indices


def share(microbatches: int, *, rank: int, world_size: int) -> Sequence[int]:
    """Return the microbatches a rank runs: contiguous, sizes differing by one at most."""
    start = microbatches * rank // world_size
    return range(start, microbatches * (rank + 1) // world_size)
