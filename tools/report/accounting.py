"""Accounting of wall time: every second of a run belongs to exactly one class. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""Classes in order of precedence: where claims overlap, the time goes to the earlier class."""

REMAINDER: Final = "between steps"

_OUTSIDE: Final = ("startup", "shutdown")


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
    rank = {label: at for at, label in enumerate(CLASSES)}
    edges = [(0.0, 0, 0), (wall_s, 0, 0)]
    for claim in claims:
        start_s, end_s = max(claim.start_s, 0.0), min(claim.end_s, wall_s)
        if start_s < end_s:
            edges += [(start_s, rank[claim.label], 1), (end_s, rank[claim.label], -1)]
    edges.sort()
    total, open_claims = dict.fromkeys(CLASSES, 0.0), [0] * len(CLASSES)
    for (start_s, at, change), (end_s, _, _) in pairwise(edges):
        open_claims[at] += change
        label = next((CLASSES[i] for i, count in enumerate(open_claims) if count), REMAINDER)
        total[label] += end_s - start_s
    return total


def within(shares: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds per class between the first step and the last."""
    return {name: seconds for name, seconds in shares.items() if name not in _OUTSIDE}


def useful(shares: Mapping[str, float]) -> float:
    """Return the goodput: the productive share of the time between first and last step."""
    inside = within(shares)
    whole_s = sum(inside.values())
    return inside.get("productive", 0.0) / whole_s if whole_s else 0.0
