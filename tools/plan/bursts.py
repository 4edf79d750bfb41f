"""The chance that nodes which fail at the same moment cost memory steps. Exact, and pure.

Of all sets of ``k`` nodes, those are harmless in which no group loses more than its parity. Their
number is a coefficient of a product of polynomials, one for each group: that of ``x^j`` is the
number of ways in which a group can lose ``j`` nodes. Holdfast's groups do not overlap, so there are
as few fatal sets of ``parity + 1`` nodes as the memory allows (Cidon et al., "Copysets: Reducing
the Frequency of Data Loss in Cloud Storage", USENIX ATC 2013).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import comb

from holdfast.tools.plan.job import PlannedJob
from holdfast.tools.plan.losses import group_shapes


def loss_at_once(job: PlannedJob, failures: int) -> float:
    """Return the chance that so many nodes, drawn at random, cost steps; from 0 to 1.

    Raises ``ValueError`` for more failures than nodes.
    """
    if not 0 <= failures <= job.nodes:
        raise ValueError(f"{failures} of {job.nodes} nodes cannot fail")
    if job.lost_with_memory == 0:
        return float(failures > 0)
    harmless: Sequence[int] = (1,)
    for size, groups in Counter(size for size, _ in group_shapes(job)).items():
        ways = ring_ways(size) if job.parity == "replicate" else group_ways(size, job.parity)
        harmless = _times(harmless, _power(ways, groups, failures), failures)
    ways_here = harmless[failures] if failures < len(harmless) else 0
    return float(1 - Fraction(ways_here, comb(job.nodes, failures)))


def group_ways(size: int, parity: int) -> list[int]:
    """Return by ``j`` the sets of ``j`` nodes that a group can lose with this parity."""
    return [comb(size, lost) for lost in range(min(parity, size) + 1)]


def ring_ways(size: int) -> list[int]:
    """Return by ``j`` the sets of ``j`` nodes of a ring of which no two are neighbours."""
    if size < 2:  # the copy is on the node itself
        return [1]
    return [1] + [
        size * comb(size - lost, lost) // (size - lost) for lost in range(1, size // 2 + 1)
    ]


def _times(one: Sequence[int], other: Sequence[int], most: int) -> list[int]:
    """Return the product of two polynomials, up to the power ``most``."""
    found = [0] * min(len(one) + len(other) - 1, most + 1)
    for power, value in enumerate(one):
        for more, factor in enumerate(other[: max(len(found) - power, 0)]):
            found[power + more] += value * factor
    return found


def _power(base: Sequence[int], exponent: int, most: int) -> Sequence[int]:
    found: Sequence[int] = (1,)
    while exponent:
        if exponent & 1:
            found = _times(found, base, most)
        base, exponent = _times(base, base, most), exponent >> 1
    return found
