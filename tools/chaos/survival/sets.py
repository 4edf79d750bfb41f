"""The sets of nodes that are lost, and what is wrong with what became of one. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

from holdfast.tools.chaos.report.losses import OUTCOMES, Loss, Outcome

_UNHARMED: Final[tuple[Outcome, ...]] = ("memory", "parity")
_BEST_FIRST: Final[tuple[Outcome, ...]] = tuple(OUTCOMES)


def sets(nodes: int) -> Iterator[tuple[int, ...]]:
    """Yield every set of nodes but the empty one, small ones first."""
    for size in range(1, nodes + 1):
        yield from combinations(range(nodes), size)


def drawn(nodes: int, *, most: int | None, seed: int) -> list[tuple[int, ...]]:
    """Return the sets that are tried: all, or ``most`` drawn from a seed, small ones first."""
    every = list(sets(nodes))
    if most is None or most >= len(every):
        return every
    chosen = random.Random(f"sets {nodes} {seed}").sample(range(len(every)), most)
    return [every[number] for number in sorted(chosen)]


def names(nodes: Sequence[int]) -> tuple[str, ...]:
    """Return the names of nodes by their numbers, as the simulation gives them."""
    return tuple(f"n{number}" for number in nodes)


def broken(loss: Loss) -> str:
    """Return what is wrong with a loss that was measured and held, "" for nothing.

    It is if it ended worse than predicted. From memory or from parity is the same: no protected
    step is lost.
    """
    if loss.predicted and _rank(loss.outcome) > _rank(loss.predicted):
        return f"{OUTCOMES[loss.outcome]}; predicted: {OUTCOMES[loss.predicted]}"
    return ""


def _rank(outcome: Outcome) -> int:
    return 0 if outcome in _UNHARMED else _BEST_FIRST.index(outcome)
