"""Statistics of numbers in one pass, piece by piece, in bounded memory.

Quantiles come from a histogram over the leading bits of each number as a float64: sign, exponent
and eight bits of mantissa. Its bins have the order of the numbers, are 0.4 % wide everywhere, and
need neither a range nor a second pass. bfloat16 is narrower than a bin, so its quantiles are
numbers that occur.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.ckpt.types import learn

Array: TypeAlias = npt.NDArray[Any]

_KEPT_BITS: Final = 20
_DROPPED_BITS: Final = 64 - _KEPT_BITS
_BINS: Final = 1 << _KEPT_BITS
_ZERO: Final = _BINS // 2
"""The bin of zero; positive numbers lie above it, negative ones below."""

_BLOCK: Final = 1 << 17

QUANTILES: Final = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


class TensorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics. All except the counts cover the finite numbers; None if there are none.

    ``std`` is that of the population; ``norm`` is the root of the sum of squares. Quantiles are
    right to 0.4 % of the number. For complex numbers, all statistics are of the magnitudes.
    """

    count: int
    finite: int
    zeros: int
    nan: int
    positive_infinite: int
    negative_infinite: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    norm: float
    quantiles: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of a histogram: numbers from ``low`` to below ``high``, which the last bar includes."""

    low: float
    high: float
    count: int


@dataclass(slots=True)
class Accumulator:
    """Collects statistics of numbers, piece by piece; use it from one thread at a time."""

    count: int = 0
    finite: int = 0
    zeros: int = 0
    nan: int = 0
    positive_infinite: int = 0
    negative_infinite: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    spread: float = 0.0
    """Sum of squared distances from the mean."""
    bins: Array = field(default_factory=lambda: np.zeros(_BINS, dtype=np.int64))

    def add(self, numbers: Array) -> None:
        """Add numbers of any shape and native type."""
        flat = numbers.reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            self._add(flat[start : start + _BLOCK])

    def _add(self, block: Array) -> None:
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            wide = (np.abs(block) if block.dtype.kind == "c" else block).astype(np.float64)
        self.count += wide.size
        usable = np.isfinite(wide)
        finite = wide if usable.all() else wide[usable]
        if finite.size < wide.size:
            self.nan += int(np.isnan(wide).sum())
            self.positive_infinite += int(np.isposinf(wide).sum())
            self.negative_infinite += int(np.isneginf(wide).sum())
        if not finite.size:
            return
        self.low, self.high = (
            min(self.low, float(finite.min())),
            max(self.high, float(finite.max())),
        )
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(finite.mean())
            spread = float(np.square(finite - mean).sum())
        self._combine(finite.size, mean, spread)
        zeros = int(finite.size - np.count_nonzero(finite))
        self.zeros += zeros
        self.bins[_ZERO] += zeros
        if zeros < finite.size:
            self._count_bins(finite[finite != 0] if zeros else finite)

    def _combine(self, count: int, mean: float, spread: float) -> None:
        """Combine means and spreads (Chan, Golub and LeVeque, 1979)."""
        total, away = self.finite + count, mean - self.mean
        share = count / total
        self.spread += spread + away * away * self.finite * share
        self.mean += away * share
        self.finite = total

    def _count_bins(self, finite: Array) -> None:
        """Count by magnitude and sign: the magnitudes of a block fill a narrow range of bins."""
        bits = finite.view("i8") >> _DROPPED_BITS
        magnitude = bits & (_ZERO - 1)
        first = int(magnitude.min())
        key = ((magnitude - first) << 1) + (bits < 0)
        found = np.bincount(key, minlength=2 * (int(magnitude.max()) - first + 1)).reshape(-1, 2)
        above, below = _ZERO + first, _ZERO - first
        self.bins[above : above + len(found)] += found[:, 0]
        self.bins[below - len(found) : below] += found[::-1, 1]

    def merge(self, part: PartialStatistics) -> None:
        """Add the numbers that another accumulator has seen."""
        seen = part.seen
        for name in ("count", "zeros", "nan", "positive_infinite", "negative_infinite"):
            setattr(self, name, getattr(self, name) + getattr(seen, name))
        if seen.finite:
            self.low, self.high = min(self.low, seen.low), max(self.high, seen.high)
            self._combine(seen.finite, seen.mean, seen.spread)
        self.bins[part.filled] += part.counts

    def part(self) -> PartialStatistics:
        """Return the collected counts in compact form; do not use this accumulator afterwards."""
        filled = np.flatnonzero(self.bins)
        counts, self.bins = self.bins[filled], np.empty(0, dtype=np.int64)
        return PartialStatistics(seen=self, filled=filled, counts=counts)

    def summary(self) -> TensorStatistics:
        """Return the statistics of the numbers seen so far."""
        some = self.finite > 0
        return TensorStatistics(
            count=self.count,
            finite=self.finite,
            zeros=self.zeros,
            nan=self.nan,
            positive_infinite=self.positive_infinite,
            negative_infinite=self.negative_infinite,
            minimum=float(self.low) if some else None,
            maximum=float(self.high) if some else None,
            mean=self.mean if some else None,
            std=math.sqrt(self.spread / self.finite) if some else None,
            norm=math.sqrt(self.spread + self.finite * self.mean * self.mean),
            quantiles={f"{q:g}": value for q, value in self._quantiles(QUANTILES)},
        )

    def _quantiles(self, shares: Sequence[float]) -> list[tuple[float, float]]:
        filled = np.flatnonzero(self.bins)
        if not filled.size:
            return []
        upto = np.cumsum(self.bins[filled])
        starts = _edges(filled)[0]
        found = []
        for share in shares:
            rank = max(math.ceil(share * self.finite), 1)
            value = float(starts[int(np.searchsorted(upto, rank))])
            found.append((share, min(max(value, self.low), self.high)))
        return found

    def bars(self, count: int) -> list[Bar]:
        """Return a histogram of ``count`` equal bars between the least and the greatest number.

        The numbers of a bin that two bars share are divided between them in proportion.
        """
        filled = np.flatnonzero(self.bins)
        if not filled.size or self.low == self.high:
            only = Bar(low=self.low, high=self.high, count=self.finite)
            return [only] if filled.size else []
        starts, ends = np.clip(np.sort(_edges(filled), axis=0), self.low, self.high)
        edges = self.low + (self.high - self.low) * (np.arange(count + 1) / count)
        width = np.where(ends > starts, ends - starts, 1.0)
        upto = np.zeros(count + 1)
        for number, edge in enumerate(edges):
            below = np.where(
                ends > starts, np.clip((edge - starts) / width, 0.0, 1.0), starts < edge
            )
            upto[number] = (self.bins[filled] * below).sum()
        upto[-1] = self.finite
        counts = np.diff(np.round(upto)).astype(int)
        return [
            Bar(low=float(edges[i]), high=float(edges[i + 1]), count=int(counts[i]))
            for i in range(count)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialStatistics:
    """The counts of an accumulator, its histogram without the empty bins."""

    seen: Accumulator
    filled: Array
    counts: Array


def _edges(bins: Array) -> Array:
    """Return both ends of each bin: nearest to zero, farthest from it."""
    magnitude = np.where(bins >= _ZERO, bins - _ZERO, _ZERO - 1 - bins).astype("u8")
    near = (magnitude << np.uint64(_DROPPED_BITS)).view("f8")
    far = ((magnitude + np.uint64(1)) << np.uint64(_DROPPED_BITS)).view("f8")
    sign = np.where(bins >= _ZERO, 1.0, -1.0)
    ends = np.stack([near, np.where(bins == _ZERO, 0.0, far)])
    return np.asarray(ends * sign)


learn(globals())
