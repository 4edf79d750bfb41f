"""Random streams that belong to the work, not to the rank that does it. Pure.

A stream is named by (seed, what, numbers). Every microbatch of every step has its own stream, so it
sees the same randomness on any rank, in any generation, the first time and when repeated.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_SEED_BITS = 63


def stream_seed(seed: int, what: str, *numbers: int | str) -> int:
    """Return the 63-bit seed of the stream ``(seed, what, numbers)``."""
    name = "\0".join((str(seed), what, *map(str, numbers)))
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The seeds of a step's phase: see `holdfast.Run.microbatches`."""

    seed: int
    step: int
    phase: int = 0

    def microbatch(self, number: int) -> int:
        """Return the seed of everything random inside one microbatch."""
        return self._seed("microbatch", self.step, number)

    def stage(self, number: int, *, stage: int) -> int:
        """Return the seed of a microbatch at a pipeline's stage; stage 0 has the microbatch's."""
        if stage == 0:
            return self.microbatch(number)
        return self._seed("stage", self.step, number, stage)

    def before_microbatches(self) -> int:
        """Return the seed at the start of the step, the same on all ranks."""
        return self._seed("step", self.step, 0)

    def after_microbatches(self) -> int:
        """Return the seed after a pass, the same on all ranks."""
        return self._seed("step", self.step, 1)

    def _seed(self, what: str, *numbers: int) -> int:
        phase = (f"phase {self.phase}",) if self.phase else ()
        return stream_seed(self.seed, what, *numbers, *phase)


def build_seed(seed: int) -> int:
    """Return the seed for building the model; the same in every generation."""
    return stream_seed(seed, "build")
