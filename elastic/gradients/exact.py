"""Sums whose value does not depend on order or grouping: rounding to a grid before adding.

Numbers that are multiples of a power of two ``q`` and whose every partial sum stays within
``q * 2**digits`` are added without rounding error, hence in any order (Demmel and Nguyen,
"Fast reproducible floating-point summation"). The grid follows from a bound on the magnitude
that all ranks agree on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.native import fixed_point

MIN_EXPONENT = -100
"""Bounds are at least 2**-100, to avoid float32's subnormal numbers."""

_MIN_WIDE_EXPONENT = -800
"""The same for float64."""

_CACHED = 1 << 16
"""Number of elements rounded at once; it halves the time compared with passes over large tensors.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method to add gradients without rounding: in dtype ``total``, on a grid of ``digits`` bits.

    ``highest`` is the exponent of the largest allowed sum; ``finest`` that of the finest grid. A
    bound starts ``headroom_bits`` above the largest magnitude seen, so that growth seldom exceeds
    it.
    """

    total: torch.dtype
    digits: int
    headroom_bits: int
    highest: int
    finest: int

    def grid(self, bound_exponent: int, *, terms: int) -> int:
        """Return e such that ``terms`` multiples of ``2**e`` within the bound add exactly."""
        return max(bound_exponent + exponent_above(terms) - self.digits, self.finest)

    def added(self, total: torch.Tensor | None, values: torch.Tensor, grid: int) -> torch.Tensor:
        """Return ``total`` (None: nothing yet) with ``values`` added, each rounded to the grid."""
        if self.total is not torch.int64:
            rounded = round_to_grid(values.to(self.total), grid)
            return rounded if total is None else total.add_(rounded)
        if (added := fixed_point.add(total, [values], grid)) is not None:
            return added[0]
        if total is None:
            total = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
        for part, sum_ in _runs(values, total):
            sum_.add_(part.double().mul_(2.0**-grid).round_().to(torch.int64))
        return total

    def mean(
        self,
        total: torch.Tensor,
        grid: int,
        *,
        terms: int,
        dtype: torch.dtype = torch.float64,
    ) -> torch.Tensor:
        """Return the mean of ``terms`` numbers whose exact sum is ``total``; may reuse it.

        Fixed point gives float64, or float32 if ``dtype`` is that and it costs less.
        """
        if self.total is not torch.int64:
            return total.div_(terms)
        if (
            dtype is torch.float32
            and (mean := fixed_point.mean(total, grid, terms=terms)) is not None
        ):
            return mean
        return total.double().mul_(2.0**grid).div_(terms)

    def largest_peak(self, *, terms: int) -> int:
        """Return the exponent above which the sum of ``terms`` such numbers might overflow."""
        return self.highest - exponent_above(terms)


FLOAT32 = Method(total=torch.float32, digits=24, headroom_bits=2, highest=127, finest=MIN_EXPONENT)
FLOAT64 = Method(total=torch.float64, digits=53, headroom_bits=2, highest=1000, finest=-900)
INT64 = Method(total=torch.int64, digits=62, headroom_bits=8, highest=1000, finest=-900)
"""Fixed point: with 38 bits below float32's 24, even small numbers keep all their bits."""

_NARROW = (torch.bfloat16, torch.float16)


def method_for(exact: Exact, dtype: torch.dtype, *, name: str) -> tuple[Method, bool]:
    """Return the method for gradients of ``dtype``, and whether its total is kept off ``.grad``.

    Raises ``ConfigError``, naming the parameter, for a dtype that cannot be added exactly.
    """
    if dtype not in (torch.float32, torch.float64, *_NARROW):
        raise ConfigError(
            f"exact={exact!r} needs real floating-point parameters, {name} is {dtype}: set "
            "exact=None, or keep the parameter in float32"
        )
    if exact == "int64":
        return INT64, True
    if dtype is torch.float64:
        return FLOAT64, False
    return FLOAT32, dtype in _NARROW


def exponent_above(value: float, *, lowest: int = MIN_EXPONENT) -> int:
    """Return the smallest e with ``2**e >= value``, but at least ``lowest``."""
    if value <= 0:
        return lowest
    mantissa, exponent = math.frexp(value)
    return max(exponent - (mantissa == 0.5), lowest)


def next_bound(bound_exponent: int, largest: float, *, headroom_bits: int) -> int:
    """Return the bound for the next step: headroom above the largest, falling by at most half."""
    wanted = exponent_above(largest) + headroom_bits if largest > 0 else MIN_EXPONENT
    return max(wanted, bound_exponent - 1, MIN_EXPONENT)


def round_to_grid(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return ``values`` rounded to multiples of ``2**exponent``, ties to even."""
    rounded = torch.empty_like(values, memory_format=torch.contiguous_format)
    for part, out in _runs(values, rounded):
        torch.mul(part, 2.0**-exponent, out=out).round_().mul_(2.0**exponent)
    return rounded


def _runs(
    values: torch.Tensor, result: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split two tensors equally into flat runs that fit in the processor's cache."""
    flat, out = values.reshape(-1), result.view(-1)
    if values.device.type != "cpu" or values.numel() <= _CACHED:
        yield flat, out
    else:
        yield from zip(torch.split(flat, _CACHED), torch.split(out, _CACHED), strict=True)


def _real(values: torch.Tensor) -> torch.Tensor:
    """Return real numbers as they are, complex ones as two."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def exact_norm(
    parts: Iterable[torch.Tensor],
    *,
    terms: int,
    reduce_max: Callable[[torch.Tensor], None],
    reduce_sum: Callable[[torch.Tensor], None],
) -> float:
    """Return the 2-norm of all ranks' ``parts``, the same for any split of the elements.

    ``terms`` is the number of elements of all ranks together; ``reduce_max`` and ``reduce_sum``
    reduce a float64 tensor over the ranks, in place.
    """
    squares = [_real(part.detach()).double().square().flatten() for part in parts]
    largest = torch.zeros(1, dtype=torch.float64)
    for square in squares:
        if square.numel():
            largest = torch.maximum(largest, square.max().cpu())
    largest.nan_to_num_(nan=math.inf, posinf=math.inf)
    reduce_max(largest)
    if not math.isfinite(largest.item()):
        return math.nan
    bound = exponent_above(largest.item(), lowest=_MIN_WIDE_EXPONENT)
    exponent = bound + exponent_above(terms) - FLOAT64.digits
    total = torch.zeros(1, dtype=torch.float64)
    for square in squares:
        total += round_to_grid(square, exponent).sum().cpu()
    reduce_sum(total)
    return math.sqrt(total.item())
