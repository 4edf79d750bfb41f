"""Drawn voyages of simulated seas, sailed and judged."""

from __future__ import annotations

from typing import Any

from holdfast.elastic.sea.settings import Islands
from holdfast.elastic.testing.seas.drawing import Voyage, voyage
from holdfast.elastic.testing.seas.sea import Kind, SeaCrew, SeaReport, SeaStrike, sail


def crews(count: int, *, steps: int = 24, steps_back: int = 0, **settings: Any) -> list[SeaCrew]:
    """Return islands in step, whose settings differ from these by ``settings``."""
    shape: dict[str, Any] = {"every": 6, "portions": 2, "overlap": 1, "patience_s": 60} | settings
    return [
        SeaCrew(
            islands=Islands(name=f"i{at}", meet="sea", founders=count, **shape),
            steps=steps,
            seconds=1.0,
            steps_back=steps_back,
        )
        for at in range(count)
    ]


def strike(kind: Kind, *islands: int, at_s: float = 8.0, seconds: float = 10.0) -> list[SeaStrike]:
    """Return one fault of each of some islands."""
    return [SeaStrike(kind=kind, island=f"i{at}", at_s=at_s, seconds=seconds) for at in islands]


def sailed(drawn: Voyage, seed: int) -> SeaReport:
    """Return the report of a voyage."""
    return sail(drawn.crews, drawn.strikes, seed=seed, exact=drawn.exact)


def check_voyage(seed: int, *, pairs: bool = False) -> None:
    """Run the voyage of a seed; in exact mode its weights are those of the quiet sea."""
    drawn = voyage(seed, pairs=pairs)
    found = sailed(drawn, seed)
    if drawn.is_alike and found.left.keys() == {"done"}:
        assert found.final == sail(drawn.crews, (), seed=seed).final, f"seed {seed}"
