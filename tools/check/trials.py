"""The plan of a check: the runs that it makes, each under a circumstance of its own. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.elastic.loop.trace.records import (
    BETWEEN,
    FIRST,
    KEPT,
    PASSED,
    STEPPED,
    PlannedDeath,
)

PROPERTIES: Final = {
    "again": "a second run of the same command gives the same",
    "ranks": "other numbers of ranks give the same",
    "shares": "shares of the work dealt otherwise give the same",
    "kills": "kills in every phase of a step give the same",
    "disk": "a job that is killed as a whole goes on from disk and gives the same",
}
"""The properties that `holdfast check` looks at, in this order."""

QUICK: Final = ("again", "ranks", "kills")
_NUMBERS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
_POINTS: Final = (FIRST, BETWEEN, PASSED, STEPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the script: its property (empty for the reference), and the circumstances.

    ``where`` is the circumstance in words. ``hold``: the whole job is killed before this step, and
    begun again.
    """

    name: str
    where: str
    ranks: int
    uneven: bool = False
    deaths: tuple[PlannedDeath, ...] = ()
    hold: int = -1


def reference(ranks: int) -> Trial:
    """Return the run that all others are compared with."""
    return Trial(name="", where=ranks_text(ranks), ranks=ranks)


def ranks_text(ranks: int) -> str:
    """Return ``alone``, ``with two ranks`` …"""
    if ranks == 1:
        return "alone"
    number = _NUMBERS[ranks] if ranks < len(_NUMBERS) else str(ranks)
    return f"with {number} ranks"


def trials(
    wanted: Sequence[str],
    *,
    ranks: Sequence[int],
    microbatches: int,
    phases: int,
    steps: int,
    by_world: bool = False,
) -> list[Trial]:
    """Return the runs that show the ``wanted`` properties, after the reference.

    ``ranks`` are the numbers of ranks, the reference's first; those beyond the number of
    ``microbatches`` are left out. ``phases`` is the number of updates in a step. With ``by_world``
    a result may depend on the ranks: a run that is compared has an undisturbed one of as many
    before it, and none has uneven shares.
    """
    usable = [count for count in ranks if count <= microbatches] or [ranks[0]]
    several = next((count for count in usable if count > 1), usable[0])
    made = {
        "again": [Trial(name="again", where="in a second run", ranks=usable[0])],
        "ranks": [
            Trial(name="ranks", where=ranks_text(count), ranks=count) for count in usable[1:]
        ],
        "shares": [
            Trial(name="shares", where="with uneven shares", ranks=several, uneven=True)
            for _ in range(1)
            if 1 < several < microbatches and not by_world
        ],
        "kills": [
            Trial(
                name="kills",
                where=f"{ranks_text(several)}, killed",
                ranks=several,
                deaths=deaths(phases=phases, steps=steps),
            )
        ],
        "disk": [
            Trial(
                name="disk",
                where=f"{ranks_text(several)}, begun again from disk",
                ranks=several,
                hold=max(1, steps // 2),
            )
        ],
    }
    if by_world and "ranks" not in wanted and several != ranks[0]:
        made["again"] += made["ranks"][:1]
        wanted = ("again", *wanted)
    return [trial for name in PROPERTIES if name in wanted for trial in made[name]]


def deaths(*, phases: int, steps: int) -> tuple[PlannedDeath, ...]:
    """Return a death at every point of every phase, dealt over the steps after the first.

    The first and the last rank die in turn.
    """
    points = [(KEPT, 0), *((point, phase) for phase in range(phases) for point in _POINTS)]
    late = max(1, steps - 1)
    return tuple(
        PlannedDeath(
            number=number,
            step=min(1 + number * late // len(points), steps - 1),
            point=point,
            phase=phase,
            who="last" if number % 2 else "first",
        )
        for number, (point, phase) in enumerate(points)
    )
