"""Making what fails small: of many things that were done together, those few that it takes.

Delta debugging: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE
TSE 2002. It knows nothing of what the things are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")


class FailureOracle(Generic[_T]):
    """The question whether some of the things fail, asked ``tries`` times at most; then: no."""

    def __init__(self, fails: Callable[[Sequence[_T]], bool], tries: int) -> None:
        self._fails, self._left = fails, tries

    def __call__(self, things: Sequence[_T]) -> bool:
        self._left -= 1
        return self._left >= 0 and self._fails(things)


def fewest(things: Sequence[_T], *, fails: Callable[[Sequence[_T]], bool]) -> tuple[_T, ...]:
    """Return some of ``things``, which fail, that fail still and of which none can be left out.

    Ever smaller pieces are left out as long as what remains fails. Empty where nothing at all is
    enough to fail.
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
