"""Shrinking of a failing set of things to the few that are needed to fail.

Delta debugging: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE
TSE 2002. The things can be of any type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")


class FailureOracle(Generic[_T]):
    """A predicate that tells whether things fail; after ``tries`` calls it returns False."""

    def __init__(self, fails: Callable[[Sequence[_T]], bool], tries: int) -> None:
        self._fails, self._left = fails, tries

    def __call__(self, things: Sequence[_T]) -> bool:
        self._left -= 1
        return self._left >= 0 and self._fails(things)


def fewest(things: Sequence[_T], *, fails: Callable[[Sequence[_T]], bool]) -> tuple[_T, ...]:
    """Return a subset of failing ``things`` that still fails and from which none can be removed.

    Ever smaller pieces are removed as long as the rest fails. Empty if the empty set fails.
    """
    kept, pieces = tuple(things), 2
    while len(kept) > 1:
        size = -(-len(kept) // pieces)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            if rest and fails(rest):
                kept, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(kept))
    return () if len(kept) == 1 and fails(()) else kept
