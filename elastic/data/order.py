"""Orders in which an epoch visits a data set: sequential, shuffled, by weight. Pure.

An order is a pure function of (seed, epoch, position), so every rank of every world finds the
same samples in the same microbatches, and going back to an earlier step costs nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.ckpt import checks
from holdfast.ckpt.types import Json
from holdfast.elastic.data.sampler import Permutation, keys, mix
from holdfast.elastic.errors import ConfigError

_UNIT = 2.0**-53
_SERIES_TERMS = 12

_RULES: Final[Mapping[str, checks.Rule]] = {
    "count": checks.optional(checks.count(1, remedy="give 1 or more samples, or None")),
    "replacement": checks.flag(),
}


class SampleOrder(Protocol):
    """The order of an epoch over a data set of ``samples`` samples."""

    def length(self, samples: int) -> int:
        """Return how many positions an epoch has. Raises ``ConfigError`` for another data set."""

    def indices(self, positions: range, *, samples: int, seed: int, epoch: int) -> list[int]:
        """Return the indices of the samples at ``positions`` of an epoch."""

    def describe(self) -> Json:
        """Return a description; a saved position is valid only for an order with an equal one."""


class Sequential:
    """Samples in index order, each once in an epoch."""

    def length(self, samples: int) -> int:
        """Return the number of samples."""
        return samples

    def indices(self, positions: range, *, samples: int, seed: int, epoch: int) -> list[int]:
        """Return the positions."""
        return list(positions)

    def describe(self) -> Json:
        """Return its name."""
        return "sequential"


class Shuffled:
    """A different random order in every epoch, each sample once; needs no memory at any size."""

    def length(self, samples: int) -> int:
        """Return the number of samples."""
        return samples

    def indices(self, positions: range, *, samples: int, seed: int, epoch: int) -> list[int]:
        """Return the samples at ``positions`` of the epoch's permutation."""
        found: list[int] = Permutation(samples, seed=seed, epoch=epoch).at(positions).tolist()
        return found

    def describe(self) -> Json:
        """Return its name."""
        return "shuffled"


class Weighted:
    """Samples drawn with probability proportional to ``weights``, one weight for each.

    ``count`` is the number of draws in an epoch (default: the number of samples). With
    ``replacement`` each position is a draw of its own. Without it an epoch visits ``count``
    different samples, heavier ones rather early; samples of weight 0 are never drawn. That order is
    an exponential race (Efraimidis and Spirakis, "Weighted random sampling with a reservoir"): it
    takes 16 bytes per sample and one sort per epoch.
    """

    def __init__(
        self, weights: Iterable[float], *, count: int | None = None, replacement: bool = True
    ) -> None:
        given = {"count": count, "replacement": replacement}
        checks.check("Weighted", given, _RULES, error=ConfigError)
        try:
            self._weights = np.array(list(weights), dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Weighted(weights=...): {error}; give one number each") from error
        if self._weights.ndim != 1:
            raise ConfigError(
                f"Weighted(weights=...) has {self._weights.ndim} dimensions: give one number for "
                "each sample"
            )
        self._replacement = replacement
        if not self._weights.size:
            raise ConfigError("Weighted(weights=[]): give one weight for each sample")
        if not np.isfinite(self._weights).all() or (self._weights < 0).any():
            raise ConfigError("Weighted: every weight must be a finite number, 0 or more")
        drawable = int(np.count_nonzero(self._weights))
        if not drawable:
            raise ConfigError("Weighted: all weights are 0, so nothing can be drawn")
        self._sums = np.cumsum(self._weights)
        self._last = int(np.flatnonzero(self._weights)[-1])  # for a product that was rounded up
        self._count = self._weights.size if count is None else count
        if not replacement and count is None:
            self._count = drawable
        if self._count < 1 or (not replacement and self._count > drawable):
            raise ConfigError(
                f"Weighted(count={self._count}, replacement={replacement}): give 1 or more, "
                f"and without replacement at most the {drawable} samples of weight above 0"
            )
        self._raced: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    def length(self, samples: int) -> int:
        """Return the number of samples that an epoch draws."""
        if samples != self._weights.size:
            raise ConfigError(
                f"Weighted has {self._weights.size} weights for {samples} samples: give one each"
            )
        return self._count

    def indices(self, positions: range, *, samples: int, seed: int, epoch: int) -> list[int]:
        """Return the samples drawn at ``positions``."""
        if not self._replacement:
            order: list[int] = self._race(seed, epoch)[positions.start : positions.stop].tolist()
            return order
        at = np.arange(positions.start, positions.stop, dtype=np.uint64)
        wanted = uniform(at, seed, epoch, "weighted") * self._sums[-1]
        drawn = np.searchsorted(self._sums, wanted, side="right")
        found: list[int] = np.minimum(drawn, self._last).tolist()
        return found

    def _race(self, seed: int, epoch: int) -> NDArray[np.int64]:
        if self._raced is None or self._raced[0] != (seed, epoch):
            entrants = np.flatnonzero(self._weights)
            chances = uniform(entrants.astype(np.uint64), seed, epoch, "race")
            with np.errstate(over="ignore"):  # the very lightest samples come last, in any order
                times = -logarithm(chances + _UNIT / 2) / self._weights[entrants]
            order = entrants[np.argsort(times, kind="stable")].astype(np.int64)
            self._raced = (seed, epoch), order
        return self._raced[1]

    def describe(self) -> Json:
        """Return the kind of draw and a checksum of the weights."""
        return ["weighted", self._replacement, self._count, zlib.crc32(self._weights.tobytes())]


def uniform(numbers: NDArray[np.uint64], *name: object) -> NDArray[np.float64]:
    """Return a value in [0, 1) per number: 53 random bits that depend on it and ``name``."""
    first, second = keys(2, *name)
    bits = mix(mix(numbers, first), second) >> np.uint64(11)
    return bits.astype(np.float64) * _UNIT


def logarithm(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the natural logarithm from basic operations alone: equal bits on every machine.

    ``np.log`` may differ in the last bit between processors, and with it an order between ranks.
    """
    mantissas, exponents = np.frexp(values)
    ratio = (mantissas - 0.75) / (mantissas + 0.75)  # |ratio| <= 1/5
    square = ratio * ratio
    series = np.zeros_like(values)
    for term in range(_SERIES_TERMS, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    return exponents * 0.6931471805599453 + (2.0 * ratio * series - 0.2876820724517809)
