"""Random streams that belong to the work, not to the rank that does it. Pure.

A stream is named by (seed, what, numbers). Every microbatch of every step has its own stream, so it
sees the same randomness on any rank, in any generation, the first time and when repeated.
"""

from __future__ import annotations

import hashlib

_SEED_BITS = 63


def stream_seed(seed: int, what: str, *numbers: int) -> int:
    """Return the 63-bit seed of the stream ``(seed, what, numbers)``."""
    name = "\0".join((str(seed), what, *map(str, numbers)))
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def microbatch_seed(seed: int, *, step: int, microbatch: int) -> int:
    """Return the seed of everything random inside one microbatch."""
    return stream_seed(seed, "microbatch", step, microbatch)


def step_seed(seed: int, *, step: int, after_microbatches: bool) -> int:
    """Return a step's seed before, or after, its microbatches; the same on all ranks."""
    return stream_seed(seed, "step", step, int(after_microbatches))


def build_seed(seed: int) -> int:
    """Return the seed for building the model; the same in every generation."""
    return stream_seed(seed, "build")
