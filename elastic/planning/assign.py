"""Who takes which place so that the sum of what they bring is largest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TypeAlias

Gains: TypeAlias = Sequence[Mapping[int, int]]
"""What each taker brings to a place; places not named are worth nothing."""

EXACT_MOST = 32
"""Up to so many places the best assignment is found, beyond it a good one."""

_PASSES = 2


def assign(gains: Gains, *, places: int) -> list[int | None]:
    """Return the place of each taker, None where it brings nothing to any that is left.

    No place is taken twice. With `EXACT_MOST` places or fewer the sum of gains is the largest
    there is (the Hungarian method in Jonker and Volgenant's form, "A Shortest Augmenting Path
    Algorithm for Dense and Sparse Linear Assignment Problems", Computing 1987); with more, the
    largest gains are taken first, which is at least half of it, and pairs exchange their places
    as long as both together win. Raises ``ValueError`` for a place that is not there.
    """
    if any(not 0 <= place < places for row in gains for place in row):
        raise ValueError(f"gains name places outside the {places} there are")
    useful = [number for number, row in enumerate(gains) if row]
    if len(useful) <= EXACT_MOST and places <= EXACT_MOST:
        found = _exact([gains[number] for number in useful], places)
    else:
        found = _greedy([gains[number] for number in useful])
    result: list[int | None] = [None] * len(gains)
    for number, place in zip(useful, found, strict=True):
        if place is not None and gains[number].get(place, 0) > 0:
            result[number] = place
    return result


def _exact(gains: Gains, places: int) -> list[int | None]:
    """Return an assignment of the largest sum; takers beyond the places get none."""
    width = max(places, len(gains))
    cost = [[-row.get(place, 0) for place in range(width)] for row in gains]
    taker_of = _least_cost(cost, width)
    found: list[int | None] = [None] * len(gains)
    for place, taker in enumerate(taker_of):
        if taker is not None and place < places:
            found[taker] = place
    return found


def _least_cost(cost: Sequence[Sequence[int]], width: int) -> list[int | None]:
    """Return the row assigned to each of ``width`` columns, rows being no more than columns.

    Rows enter one by one; each by the cheapest alternating path under the potentials so far.
    """
    row_price: list[float] = [0] * (len(cost) + 1)
    price: list[float] = [0] * (width + 1)
    row_of = [0] * (width + 1)  # numbered from 1; 0: free
    for row in range(1, len(cost) + 1):
        row_of[0], at = row, 0
        least: list[float] = [inf] * (width + 1)
        before = [0] * (width + 1)
        done = [False] * (width + 1)
        while row_of[at]:
            done[at] = True
            current, delta, following = row_of[at], inf, 0
            for column in range(1, width + 1):
                if done[column]:
                    continue
                reduced = cost[current - 1][column - 1] - row_price[current] - price[column]
                if reduced < least[column]:
                    least[column], before[column] = reduced, at
                if least[column] < delta:
                    delta, following = least[column], column
            for column in range(width + 1):
                if done[column]:
                    row_price[row_of[column]] += delta
                    price[column] -= delta
                else:
                    least[column] -= delta
            at = following
        while at:
            row_of[at], at = row_of[before[at]], before[at]
    return [row - 1 if row else None for row in row_of[1:]]


def _greedy(gains: Gains) -> list[int | None]:
    edges = [
        (-gain, taker, place) for taker, row in enumerate(gains) for place, gain in row.items()
    ]
    edges.sort()
    place_of: list[int | None] = [None] * len(gains)
    taker_of: dict[int, int] = {}
    for _, taker, place in edges:
        if place_of[taker] is None and place not in taker_of:
            place_of[taker], taker_of[place] = place, taker
    for _ in range(_PASSES):
        exchanged = 0
        for loss, taker, place in edges:
            if place_of[taker] != place:
                exchanged += _exchange(gains, (-loss, taker, place), place_of, taker_of)
        if not exchanged:
            break
    return place_of


def _exchange(
    gains: Gains,
    edge: tuple[int, int, int],
    place_of: list[int | None],
    taker_of: dict[int, int],
) -> bool:
    """Let a taker have a place instead of its own if both sides together win."""
    gain, taker, place = edge
    have, other = place_of[taker], taker_of.get(place)
    now = (gains[taker].get(have, 0) if have is not None else 0) + (
        gains[other].get(place, 0) if other is not None else 0
    )
    then = gain + (gains[other].get(have, 0) if other is not None and have is not None else 0)
    if then <= now:
        return False
    place_of[taker], taker_of[place] = place, taker
    if other is not None:
        place_of[other] = have
    if have is not None:
        if other is None:
            del taker_of[have]
        else:
            taker_of[have] = other
    return True
