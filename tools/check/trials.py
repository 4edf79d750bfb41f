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
_MOST_LATER: Final = 4
"""The most updates of a step, after its first, in which a rank dies."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """One loop of a script: the function's name, its updates in a step, and the steps it made."""

    name: str
    phases: int
    steps: int


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
    stages: Sequence[StageShape],
    by_world: bool = False,
) -> list[Trial]:
    """Return the runs that show the ``wanted`` properties, after the reference.

    ``ranks`` are the numbers of ranks, the reference's first; those beyond the number of
    ``microbatches`` are left out. ``stages`` are the script's loops. With ``by_world`` a result may
    depend on the ranks: a run that is compared has an undisturbed one of as many before it, and
    none has uneven shares.
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
                deaths=deaths(stages),
            )
        ],
        "disk": [
            Trial(
                name="disk",
                where=f"{ranks_text(several)}, begun again from disk",
                ranks=several,
                hold=max(1, stages[0].steps // 2),
            )
        ],
    }
    if by_world and "ranks" not in wanted and several != ranks[0]:
        made["again"] += made["ranks"][:1]
        wanted = ("again", *wanted)
    return [trial for name in PROPERTIES if name in wanted for trial in made[name]]


def deaths(stages: Sequence[StageShape]) -> tuple[PlannedDeath, ...]:
    """Return the deaths of one run, dealt over the steps after the first.

    In the first stage there is one after the snapshot, one at every point of the first update, and
    one in each later update, at a point that moves on; in each later stage there is one. Of many
    updates only some are met, the last among them. The first and the last rank die in turn.
    """
    first = stages[0]
    points = [(KEPT, 0), *((point, 0) for point in _POINTS)]
    points += [(_POINTS[phase % len(_POINTS)], phase) for phase in _some(first.phases - 1)]
    late = max(1, first.steps - 1)
    found = [
        (first.name, min(1 + at * late // len(points), first.steps - 1), point, phase)
        for at, (point, phase) in enumerate(points)
    ]
    found += [(stage.name, min(1, stage.steps - 1), BETWEEN, 0) for stage in stages[1:]]
    return tuple(
        PlannedDeath(
            number=number,
            stage=stage,
            step=step,
            point=point,
            phase=phase,
            who="last" if number % 2 else "first",
        )
        for number, (stage, step, point, phase) in enumerate(found)
    )


def _some(count: int) -> list[int]:
    """Return the numbers from 1 to ``count``, or some of them if they are many."""
    most = min(count, _MOST_LATER)
    return [1 + at * (count - 1) // max(1, most - 1) for at in range(most)]
