"""The sets of nodes to lose, and the check of each outcome. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

from holdfast.tools.chaos.report.losses import OUTCOMES, Loss, Outcome

_UNHARMED: Final[tuple[Outcome, ...]] = ("memory", "parity")
_BEST_FIRST: Final[tuple[Outcome, ...]] = tuple(OUTCOMES)


def sets(nodes: int) -> Iterator[tuple[int, ...]]:
    """Yield every non-empty set of nodes, small ones first."""
    for size in range(1, nodes + 1):
        yield from combinations(range(nodes), size)


def drawn(nodes: int, *, most: int | None, seed: int) -> list[tuple[int, ...]]:
    """Return the sets to try: all, or ``most`` drawn from a seed, small ones first."""
    every = list(sets(nodes))
    if most is None or most >= len(every):
        return every
    chosen = random.Random(f"sets {nodes} {seed}").sample(range(len(every)), most)
    return [every[number] for number in sorted(chosen)]


def names(nodes: Sequence[int]) -> tuple[str, ...]:
    """Return the names of nodes by their numbers, as in the simulation."""
    return tuple(f"n{number}" for number in nodes)


def broken(loss: Loss) -> str:
    """Return what is wrong with a measured loss that held, "" for nothing.

    It is wrong if it ended worse than predicted. Memory and parity count as equal: in both cases no
    protected step is lost.
    """
    if loss.predicted and _rank(loss.outcome) > _rank(loss.predicted):
        return f"{OUTCOMES[loss.outcome]}; predicted: {OUTCOMES[loss.predicted]}"
    return ""


def _rank(outcome: Outcome) -> int:
    return 0 if outcome in _UNHARMED else _BEST_FIRST.index(outcome)
