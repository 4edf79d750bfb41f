"""The best time between two saves, and the time that a job then takes. Pure.

Young's first-order interval is ``sqrt(2 c M)`` for a save that costs ``c`` and a mean time ``M``
between failures (Young, "A First Order Approximation to the Optimum Checkpoint Interval", CACM
17(9), 1974). Daly's has the next orders, and his model of the time of a job counts failures during
recoveries and repeated work (Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", FGCS 22(3), 2006). Two levels, memory for most failures and a store for the rest,
are Daly's model applied twice, as in multi-level checkpointing (Moody et al., "Design, Modeling,
and Evaluation of a Scalable Multi-level Checkpointing System", SC 2010; Di et al., "Optimization of
Multi-level Checkpoint Model for Large Scale HPC Applications", IPDPS 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable


def young(cost_s: float, rate: float) -> float:
    """Return Young's interval of useful seconds; infinite if nothing fails."""
    return math.sqrt(2.0 * cost_s / rate) if rate else math.inf


def daly(cost_s: float, rate: float) -> float:
    """Return Daly's interval of useful seconds; infinite if nothing fails."""
    if not rate:
        return math.inf
    mean_s = 1.0 / rate
    if cost_s >= 2.0 * mean_s:
        return mean_s
    part = cost_s / (2.0 * mean_s)
    return math.sqrt(2.0 * cost_s * mean_s) * (1.0 + math.sqrt(part) / 3.0 + part / 9.0) - cost_s


def taken(useful_s: float, *, cost_s: float, rate: float, return_s: float) -> float:
    """Return the expected seconds of ``useful_s`` of work and one save of ``cost_s`` after it.

    A failure (``rate`` per second) costs ``return_s`` and all work since the save before; it may
    come during the return, too. Infinite where the work would practically never end.
    """
    span_s = useful_s + cost_s
    if rate * (span_s + return_s) < 1e-9:  # the limit, in which nothing fails
        return span_s
    try:
        return math.exp(rate * return_s) * math.expm1(rate * span_s) / rate
    except OverflowError:
        return math.inf


def least(value: Callable[[int], float], *, low: int, high: int) -> int:
    """Return the integer from ``low`` to ``high`` at which a function with one valley is least."""
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if value(left) <= value(right):
            high = right
        else:
            low = left
    return min(range(low, high + 1), key=value)
