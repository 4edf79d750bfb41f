"""Shares: the number of microbatches of each rank, by measured speed within limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import pairwise

MOST_RATIO = 4.0
"""Largest speed ratio between two ranks that is believed; measurements have errors."""

LEAST_GAIN = 0.05
"""Smallest expected gain, as a fraction of a step's time, for which shares change."""


def even(microbatches: int, ranks: int) -> tuple[int, ...]:
    """Return shares that differ by one at most."""
    ends = [microbatches * rank // ranks for rank in range(ranks + 1)]
    return tuple(after - before for before, after in pairwise(ends))


def part(
    microbatches: int, *, rank: int, ranks: int, shares: Sequence[int] = (), abreast: int = 1
) -> range:
    """Return the microbatches of data-parallel index ``rank``: contiguous, in rank order.

    ``abreast`` consecutive ranks run theirs in *rounds*: in each round they run as many consecutive
    microbatches, one per rank, at the same time. The microbatches of a round depend on nothing
    else, so their joint result is the same for any number of ranks. ``shares`` is as in a
    generation record: empty for even ones. Raises ``ValueError`` if the shares do not fit the
    numbers of microbatches and ranks.
    """
    sizes = tuple(shares) or alongside(even(microbatches // abreast, ranks // abreast), abreast)
    if len(sizes) != ranks or sum(sizes) != microbatches:
        raise ValueError(f"shares {sizes} are not of {microbatches} microbatches on {ranks} ranks")
    lane = rank % abreast
    if len(set(sizes[rank - lane : rank - lane + abreast])) > 1:
        raise ValueError(f"shares {sizes} differ between {abreast} ranks abreast")
    start = sum(sizes[: rank - lane]) + lane
    return range(start, start + sizes[rank] * abreast, abreast)


def alongside(shares: Sequence[int], abreast: int) -> tuple[int, ...]:
    """Return the shares of all ranks from those of each set of ``abreast`` ranks."""
    return tuple(share for share in shares for _ in range(abreast))


def step_time(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the time of the slowest rank; ``speeds`` are in microbatches per second."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def by_speed(
    microbatches: int,
    speeds: Sequence[float],
    *,
    previous: Sequence[int] = (),
    least_gain: float = LEAST_GAIN,
) -> tuple[tuple[int, ...], str]:
    """Return each rank's number of microbatches, and the reason.

    ``speeds`` are microbatches per second of computing, 0 if not measured (such a rank counts as
    the median). Every rank has at least one microbatch, and the shares add up to ``microbatches``;
    the slowest rank finishes as early as whole shares allow. ``previous`` shares, or even ones,
    stay unless a step would become shorter by ``least_gain``. Raises ``ValueError`` if there are
    more ranks than microbatches.
    """
    ranks = len(speeds)
    if not 0 < ranks <= microbatches:
        raise ValueError(f"{microbatches} microbatches cannot be shared by {ranks} ranks")
    stands = tuple(previous)
    if len(stands) != ranks or sum(stands) != microbatches or min(stands) < 1:
        stands = even(microbatches, ranks)
    measured = sorted(speed for speed in speeds if speed > 0)
    if not measured:
        return stands, "no speeds were measured"
    known = _bounded([speed or measured[len(measured) // 2] for speed in speeds])
    best = _shortest(microbatches, known)
    now_s, best_s = step_time(stands, known), step_time(best, known)
    gain = 1 - best_s / now_s
    if gain < least_gain:
        return stands, f"the shares are within {least_gain:.0%} of the best"
    return best, (
        f"shares of {min(best)} to {max(best)} microbatches by measured speed: a step is expected "
        f"to take {gain:.0%} less time"
    )


def _bounded(speeds: Sequence[float]) -> list[float]:
    """Limit the speeds around the median, so that no two differ by more than `MOST_RATIO`."""
    middle = sorted(speeds)[len(speeds) // 2]
    reach = MOST_RATIO**0.5
    return [min(max(speed, middle / reach), middle * reach) for speed in speeds]


def _shortest(microbatches: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Give each microbatch to the rank that would finish it first."""
    total = sum(speeds)
    shares = [max(int((microbatches - len(speeds)) * speed / total), 1) for speed in speeds]
    queue = [((s + 1) / v, r) for r, (s, v) in enumerate(zip(shares, speeds, strict=True))]
    heapify(queue)
    for _ in range(microbatches - sum(shares)):
        _, rank = queue[0]
        shares[rank] += 1
        heapreplace(queue, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)
