"""Sums whose value does not depend on order or grouping: rounding to a grid before adding.

Numbers that are multiples of a power of two ``q`` and whose every partial sum stays within
``q * 2**digits`` are added without rounding error, hence in any order (Demmel and Nguyen,
"Fast reproducible floating-point summation"). The grid follows from a bound on the magnitude
that all ranks agree on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

FLOAT32_DIGITS = 24
FLOAT64_DIGITS = 53
MIN_EXPONENT = -100
"""Grids are not finer than 2**-100: beyond lie float32's subnormal numbers."""

_MIN_WIDE_EXPONENT = -800
"""The same for float64."""

HEADROOM_BITS = 2
"""A bound starts at four times the largest magnitude seen, so that growth seldom exceeds it."""


def exponent_above(value: float, *, lowest: int = MIN_EXPONENT) -> int:
    """Return the smallest e with ``2**e >= value``, but at least ``lowest``."""
    if value <= 0:
        return lowest
    mantissa, exponent = math.frexp(value)
    return max(exponent - (mantissa == 0.5), lowest)


def grid_exponent(bound_exponent: int, *, terms: int, digits: int = FLOAT32_DIGITS) -> int:
    """Return e such that ``terms`` multiples of ``2**e``, each within the bound, add exactly."""
    return max(bound_exponent + exponent_above(terms) - digits, MIN_EXPONENT)


def next_bound(bound_exponent: int, largest: float) -> int:
    """Return the bound for the next step: headroom over the largest, decaying by half at most."""
    wanted = exponent_above(largest) + HEADROOM_BITS if largest > 0 else MIN_EXPONENT
    return max(wanted, bound_exponent - 1, MIN_EXPONENT)


def round_to_grid(values: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return ``values`` rounded to multiples of ``2**exponent``, ties to even."""
    return (values * 2.0**-exponent).round_().mul_(2.0**exponent)


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
    squares = [part.detach().double().square().flatten() for part in parts]
    largest = torch.zeros(1, dtype=torch.float64)
    for square in squares:
        if square.numel():
            largest = torch.maximum(largest, square.max().cpu())
    largest.nan_to_num_(nan=math.inf, posinf=math.inf)
    reduce_max(largest)
    if not math.isfinite(largest.item()):
        return math.nan
    bound = exponent_above(largest.item(), lowest=_MIN_WIDE_EXPONENT)
    exponent = bound + exponent_above(terms) - FLOAT64_DIGITS
    total = torch.zeros(1, dtype=torch.float64)
    for square in squares:
        total += round_to_grid(square, exponent).sum().cpu()
    reduce_sum(total)
    return math.sqrt(total.item())
