"""The order of a ``torch.utils.data.Sampler`` as the order of a loader.

A sampler draws the order of an epoch from generators that move on. Here each epoch is drawn anew
under a seed of its own, so the order depends on nothing but the seed and the epoch, and going back
to an earlier step finds the same samples. It takes 8 bytes per position of one epoch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.randomness import stream_seed
from holdfast.elastic.seeding import kept, seed_host

_DESCRIBED_SEED = 0


class SamplerOrder:
    """The order in which ``sampler`` visits its data set; an epoch is as long as the sampler.

    ``sampler`` is a torch Sampler, or yields numbers of samples like one. The CPU's global
    generators and the sampler's ``generator`` are seeded for each epoch, and as before afterwards;
    ``set_epoch`` is called. Raises ``ConfigError`` for a sampler that divides the data
    set by rank, that yields batches, that has no length, or that draws two orders under one seed.
    """

    def __init__(self, sampler: Iterable[int]) -> None:
        if isinstance(sampler, DistributedSampler):
            raise ConfigError(
                "run.loader: a DistributedSampler divides the data set by rank, and run.loader "
                "divides every step itself, for any number of ranks: leave it out and give "
                "shuffle=True or False"
            )
        if not hasattr(sampler, "__len__"):
            raise ConfigError(
                f"run.loader: {_named(sampler)} has no length, so no epoch of it ends: give it "
                "__len__, the number of samples that it yields"
            )
        self._sampler: Any = sampler
        self._drawn: tuple[tuple[int, int], NDArray[np.int64]] | None = None
        first = self._draw(_DESCRIBED_SEED, 0)
        if not np.array_equal(first, self._draw(_DESCRIBED_SEED, 0)):
            raise ConfigError(
                f"run.loader: {_named(sampler)} draws another order each time, so a restore could "
                "not find its samples: let it draw from a torch.Generator in its attribute "
                "`generator`, or from the global generators"
            )
        self._described: list[Json] = [
            "sampler",
            type(sampler).__name__,
            len(first),
            zlib.crc32(first.tobytes()),
        ]

    def length(self, samples: int) -> int:
        """Return the number of samples that the sampler yields in an epoch."""
        return len(self._sampler)

    def indices(self, positions: range, *, samples: int, seed: int, epoch: int) -> list[int]:
        """Return the samples at ``positions`` of the epoch."""
        if self._drawn is None or self._drawn[0] != (seed, epoch):
            self._drawn = (seed, epoch), self._draw(seed, epoch)
        found: list[int] = self._drawn[1][positions.start : positions.stop].tolist()
        if found and not 0 <= min(found) <= max(found) < samples:
            raise ConfigError(
                f"run.loader: {_named(self._sampler)} yields samples {min(found)} to {max(found)} "
                f"of a data set of {samples}: make it for this data set"
            )
        return found

    def describe(self) -> Json:
        """Return the kind of sampler, its length and a checksum of an order that it draws."""
        return list(self._described)

    def _draw(self, seed: int, epoch: int) -> NDArray[np.int64]:
        with self._seeded(stream_seed(seed, "sampler", epoch), epoch):
            found = list(self._sampler)
        if not all(isinstance(index, int | np.integer) for index in found):
            raise ConfigError(
                f"run.loader: {_named(self._sampler)} yields {found[0]!r}: give a sampler of "
                "numbers of samples, and no batch sampler; batch= says the size of a step"
            )
        if len(found) != len(self._sampler):
            raise ConfigError(
                f"run.loader: {_named(self._sampler)} has the length {len(self._sampler)} and "
                f"yields {len(found)} samples in epoch {epoch}: every epoch must have its length"
            )
        return np.array(found, dtype=np.int64)

    @contextmanager
    def _seeded(self, seed: int, epoch: int) -> Iterator[None]:
        generator = getattr(self._sampler, "generator", None)
        own = generator if isinstance(generator, torch.Generator) else None
        before = None if own is None else own.get_state()
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with kept():
            seed_host(seed)
            if own is not None:
                own.manual_seed(seed)
            try:
                yield
            finally:
                if own is not None and before is not None:
                    own.set_state(before)


def _named(sampler: Any) -> str:
    return f"the sampler {type(sampler).__name__}"
