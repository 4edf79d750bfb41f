"""Drawn voyages of simulated seas, sailed and judged."""

from __future__ import annotations

from holdfast.elastic.testing.seas.drawing import Voyage, voyage
from holdfast.elastic.testing.seas.sea import SeaReport, sail


def sailed(drawn: Voyage, seed: int) -> SeaReport:
    """Return the report of a voyage."""
    return sail(drawn.crews, drawn.strikes, seed=seed, exact=drawn.exact)


def check_voyage(seed: int, *, pairs: bool = False) -> None:
    """Run the voyage of a seed; in exact mode its weights are those of the quiet sea."""
    drawn = voyage(seed, pairs=pairs)
    found = sailed(drawn, seed)
    if drawn.is_alike and found.left.keys() == {"done"}:
        assert found.final == sail(drawn.crews, (), seed=seed).final, f"seed {seed}"
