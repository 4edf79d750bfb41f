"""Assignment of takers to places with the largest sum of gains. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Gains: TypeAlias = Sequence[Mapping[int, int]]
"""The gain of each taker at each place; missing places have gain 0."""

EXACT_MOST = 32
"""Number of places up to which the best assignment is found; beyond it, a good one."""

_PASSES = 2

_Numbers: TypeAlias = npt.NDArray[np.int64]


class Edges(NamedTuple):
    """The same as `Gains`, as arrays with one entry per pair of taker and place; no pair twice."""

    takers: _Numbers
    places: _Numbers
    gains: _Numbers


def assign(gains: Gains, *, places: int) -> list[int | None]:
    """Return the place of each taker, None if it has no gain at any place that is left.

    No place is taken twice. With `EXACT_MOST` places or fewer the sum of gains is the largest
    possible (the Hungarian method in Jonker and Volgenant's form, "A Shortest Augmenting Path
    Algorithm for Dense and Sparse Linear Assignment Problems", Computing 1987); with more, the
    largest gains are taken first, which gives at least half of it, and pairs exchange their places
    as long as their sum grows. Raises ``ValueError`` for a place that does not exist.
    """
    if any(not 0 <= place < places for row in gains for place in row):
        raise ValueError(f"gains name places outside the {places} there are")
    useful = [number for number, row in enumerate(gains) if row]
    if len(useful) > EXACT_MOST or places > EXACT_MOST:
        return assign_edges(edges_of(gains), takers=len(gains))
    result: list[int | None] = [None] * len(gains)
    found = _exact([gains[number] for number in useful], places)
    for number, place in zip(useful, found, strict=True):
        if place is not None and gains[number].get(place, 0) > 0:
            result[number] = place
    return result


def edges_of(gains: Gains) -> Edges:
    """Return gains as arrays."""
    takers = [taker for taker, row in enumerate(gains) for _ in row]
    places = [place for row in gains for place in row]
    values = [gain for row in gains for gain in row.values()]
    return Edges(*(np.array(each, dtype=np.int64) for each in (takers, places, values)))


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

    Rows are added one by one, each along the cheapest alternating path under the potentials so far.
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


def assign_edges(edges: Edges, *, takers: int) -> list[int | None]:
    """Like `assign` with many places: largest gains first, then exchanges that raise the sum."""
    order = np.lexsort((edges.places, edges.takers, -edges.gains))
    edges = Edges(*(each[order] for each in edges))
    if not edges.gains.size:
        return [None] * takers
    worth = _Worth(edges)
    place_of, taker_of = _largest_first(edges, takers)
    for _ in range(_PASSES):
        first = worth.first_to_win(place_of, taker_of)
        if first is None or not _exchanges(edges, first, place_of, taker_of):
            break
    useful = worth.at(np.arange(takers), _or_none(place_of)) > 0
    return [place if use else None for place, use in zip(place_of, useful.tolist(), strict=True)]


class _Worth:
    """The gains, looked up by arrays of takers and places; -1 stands for none."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self._width = int(edges.places.max()) + 1
        names = edges.takers * self._width + edges.places
        self._order = np.argsort(names)
        self._names = names[self._order]

    def at(self, takers: _Numbers, places: _Numbers) -> _Numbers:
        """Return the gain of each taker at its place."""
        wanted = takers * self._width + places
        found = np.minimum(np.searchsorted(self._names, wanted), len(self._names) - 1)
        there = (self._names[found] == wanted) & (takers >= 0) & (places >= 0)
        return np.where(there, self._edges.gains[self._order[found]], 0)

    def first_to_win(
        self, place_of: Sequence[int | None], taker_of: Mapping[int, int]
    ) -> int | None:
        """Return the first edge whose exchange would raise the sum now; mostly none.

        All edges are evaluated at once, because nothing changes before the first exchange.
        """
        takers, places, gains = self._edges
        owner = np.full(self._width, -1, dtype=np.int64)
        owner[list(taker_of)] = list(taker_of.values())
        mine, other = _or_none(place_of)[takers], owner[places]
        now = self.at(takers, mine) + self.at(other, places)
        then = gains + self.at(other, mine)
        winning = np.flatnonzero((then > now) & (mine != places))
        return int(winning[0]) if winning.size else None


def _or_none(places: Sequence[int | None]) -> _Numbers:
    return np.array([-1 if place is None else place for place in places], dtype=np.int64)


def _largest_first(edges: Edges, takers: int) -> tuple[list[int | None], dict[int, int]]:
    """Return every taker's place and every place's taker; earlier edges take precedence."""
    place_of: list[int | None] = [None] * takers
    taker_of: dict[int, int] = {}
    for taker, place in zip(edges.takers.tolist(), edges.places.tolist(), strict=True):
        if place_of[taker] is None and place not in taker_of:
            place_of[taker], taker_of[place] = place, taker
    return place_of, taker_of


def _exchanges(
    edges: Edges, first: int, place_of: list[int | None], taker_of: dict[int, int]
) -> int:
    """Go through the edges from the ``first`` one on; return the number of exchanges."""
    takers, places, gains = (each.tolist() for each in edges)
    rows: dict[int, dict[int, int]] = {}
    for taker, place, gain in zip(takers, places, gains, strict=True):
        rows.setdefault(taker, {})[place] = gain
    exchanged = 0
    for taker, place, gain in zip(takers[first:], places[first:], gains[first:], strict=True):
        if place_of[taker] != place:
            exchanged += _exchange(rows, (gain, taker, place), place_of, taker_of)
    return exchanged


def _exchange(
    gains: Mapping[int, Mapping[int, int]],
    edge: tuple[int, int, int],
    place_of: list[int | None],
    taker_of: dict[int, int],
) -> bool:
    """Exchange a taker's place for another if the sum of both sides grows."""
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
