"""Rounds of completions as numbers: the microbatches that a round serves, its chunks. Pure.

The microbatches of an epoch are counted from 0. A round serves ``length`` of them in a row: each of
its slices once, then again for every further iteration, as TRL deals them out. It is sampled in
chunks of whole groups and whole slices, which do not depend on the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundShape:
    """The shape of all rounds of a run.

    ``rows`` completions are a slice, the input of a microbatch; a prompt has ``group`` completions.
    A round has ``slices`` slices and goes through them ``iterations`` times. A step has
    ``microbatches``.
    """

    rows: int
    group: int
    slices: int
    iterations: int
    microbatches: int

    @property
    def length(self) -> int:
        """Microbatches that a round serves."""
        return self.slices * self.iterations

    @property
    def completions(self) -> int:
        """Completions of a round."""
        return self.rows * self.slices

    @property
    def chunk(self) -> int:
        """Completions that are sampled together."""
        return math.lcm(self.rows, self.group)

    @property
    def chunks(self) -> int:
        """Chunks of a round."""
        return self.completions // self.chunk

    def slice_at(self, microbatch: int) -> tuple[int, int]:
        """Return the round and the slice of a microbatch of the epoch."""
        return microbatch // self.length, microbatch % self.slices

    def rounds_of(self, microbatches: range) -> range:
        """Return the rounds that serve these microbatches of the epoch."""
        if not microbatches:
            return range(0)
        return range(microbatches[0] // self.length, microbatches[-1] // self.length + 1)

    def is_within(self, microbatch: int) -> bool:
        """True if a round begins before this microbatch and serves it."""
        return microbatch % self.length != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """The steps of epochs of ``microbatches`` each, of which a step takes up to ``most``."""

    microbatches: int
    most: int

    @property
    def steps(self) -> int:
        """Steps of an epoch; the last one may be smaller."""
        return math.ceil(self.microbatches / self.most)

    def of_step(self, step: int) -> tuple[int, range]:
        """Return a step's epoch, and its microbatches in that epoch."""
        epoch, number = divmod(step, self.steps)
        first = number * self.most
        return epoch, range(first, min(first + self.most, self.microbatches))
