"""Where the wall time went: every second of a run in exactly one class. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

CLASSES: Final = (
    "recovery",
    "join",
    "re-executed",
    "held by the demo",
    "waiting for rollouts",
    "productive",
    "interrupted step",
    "startup",
    "shutdown",
    "between steps",
)
"""Classes in order of precedence: where claims overlap, the earlier class has the second."""

REMAINDER: Final = "between steps"


class Interval(NamedTuple):
    """A claim: the time from ``start_s`` to ``end_s`` belongs to ``label``."""

    label: str
    start_s: float
    end_s: float


def account(wall_s: float, claims: Sequence[Interval]) -> dict[str, float]:
    """Return seconds per class, adding up to ``wall_s``; unclaimed time is "between steps".

    Raises ``ValueError`` for a label that is no class.
    """
    if unknown := {claim.label for claim in claims} - set(CLASSES):
        raise ValueError(f"no such classes of time: {sorted(unknown)}")
    inside = [
        Interval(claim.label, max(claim.start_s, 0.0), min(claim.end_s, wall_s))
        for claim in claims
        if claim.end_s > 0.0 and claim.start_s < wall_s
    ]
    rank = {label: at for at, label in enumerate(CLASSES)}
    edges = sorted({0.0, wall_s, *(t for claim in inside for t in claim[1:])})
    total = dict.fromkeys(CLASSES, 0.0)
    for start_s, end_s in pairwise(edges):
        here = [c.label for c in inside if c.start_s <= start_s and c.end_s >= end_s]
        total[min(here, key=rank.__getitem__, default=REMAINDER)] += end_s - start_s
    return total
