"""Seas and faults drawn from a seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from holdfast.elastic.sea.records import DealtData
from holdfast.elastic.sea.settings import Islands, Nesterov, Quorum
from holdfast.elastic.testing.seas.model import SAMPLES
from holdfast.elastic.testing.seas.sea import Kind, SeaCrew, SeaStrike

PATIENCE_S: Final = 40.0

_SHORT: Final[tuple[Kind, ...]] = ("kill", "wipe", "notice", "freeze", "cut", "slow", "flaky")
_LONG: Final[tuple[Kind, ...]] = (*_SHORT, "lose", "lose", "freeze", "cut")


@dataclass(frozen=True, slots=True, kw_only=True)
class Voyage:
    """A drawn sea.

    ``is_calm``: no fault lasts as long as an island's patience, none loses all. ``is_alike``: the
    weights at the end are those of the quiet sea, if no island leaves before its end.
    """

    crews: Sequence[SeaCrew]
    strikes: Sequence[SeaStrike]
    exact: bool
    is_calm: bool
    is_alike: bool


def voyage(seed: int, *, trio: bool = False, pairs: bool = False) -> Voyage:
    """Draw a sea of two to five islands, and up to six faults; or a longer calm one of three.

    With ``pairs`` the islands meet in pairs.
    """
    draw = Random(f"voyage {seed}")
    count, portions = draw.choice((2, 2, 3, 3, 4, 5)), draw.choice((1, 2, 2, 3))
    stride = draw.choice((2, 3, 4))
    is_quorum, is_calm = draw.random() < 0.4, draw.random() < 0.5
    steps = stride * portions * draw.choice((2, 3, 4))
    if trio:
        count, is_quorum, is_calm, steps = 3, False, True, stride * portions * 5
    is_quorum = is_quorum and not pairs
    names = [f"i{at}" for at in range(count)]
    late = names[-1:] if not is_calm and count > 2 and draw.random() < 0.4 else []
    quorum = Quorum(draw.choice((0.4, 0.6, 0.9)), grace_s=draw.choice((0, 2)))
    crews = [
        SeaCrew(
            islands=Islands(
                name=name,
                meet="sea",
                every=stride * portions,
                portions=portions,
                overlap=draw.randint(1, stride - 1),
                wait=quorum if is_quorum else "all",
                age_limit=2,
                outer=Nesterov(),
                patience_s=PATIENCE_S,
                founders=count - len(late),
                topology="pairs" if pairs else "all",
            ),
            steps=steps,
            seconds=draw.choice((0.5, 1.0, 2.0)),
            after_s=draw.uniform(10, 40) if name in late else draw.uniform(0, 2),
        )
        for name in names
    ]
    longest_s = 0.4 * PATIENCE_S if is_calm else 2.5 * PATIENCE_S
    strikes = [
        SeaStrike(
            kind=draw.choice(_SHORT if is_calm else _LONG),
            island=draw.choice(names),
            at_s=draw.uniform(4, 50),
            seconds=draw.uniform(0.5, longest_s),
        )
        for _ in range(draw.randint(0, 6))
    ]
    exact = draw.random() < 0.7
    is_alike = exact and not is_quorum and not late
    if not (trio or pairs) and draw.random() < 0.3:  # by speed: then time decides on the weights
        is_alike = False
        times = draw.choice((2, 3))
        crews = [_by_speed(crew, times=times) for crew in crews]
    return Voyage(crews=crews, strikes=strikes, exact=exact, is_calm=is_calm, is_alike=is_alike)


def dealt(drawn: Voyage, seed: int) -> Voyage:
    """Return a voyage whose logbook deals about as many samples as the islands would train."""
    draw = Random(f"dealt {seed}")
    samples = draw.randint(20, 150)
    total = SAMPLES * sum(crew.steps for crew in drawn.crews)
    data = DealtData(samples=samples, order='"none"', seed=0, epochs=-(-total // samples))
    crews = [
        dataclasses.replace(
            crew, data=data, islands=dataclasses.replace(crew.islands, data="dealt")
        )
        for crew in drawn.crews
    ]
    return dataclasses.replace(drawn, crews=crews)


def guarded(drawn: Voyage, seed: int) -> Voyage:
    """Return a voyage whose islands have loss guards, and up to four faults that these see."""
    draw = Random(f"guarded {seed}")
    crews = [
        dataclasses.replace(crew, steps_back=draw.randint(1, crew.islands.overlap))
        for crew in drawn.crews
    ]
    faults = [
        SeaStrike(
            kind="spoil",
            island=draw.choice(crews).islands.name,
            at_s=draw.uniform(2, 40),
            seconds=1.0,
        )
        for _ in range(draw.randint(1, 4))
    ]
    return dataclasses.replace(drawn, crews=crews, strikes=(*drawn.strikes, *faults))


def _by_speed(crew: SeaCrew, *, times: int) -> SeaCrew:
    """Return a crew that takes so many times as many steps to a tide if it is fast."""
    islands = crew.islands
    every = islands.every * times
    faster = dataclasses.replace(islands, every=every, least_every=islands.every)
    return dataclasses.replace(crew, islands=faster, steps=crew.steps * times)
