"""Taking groups as they arrive: the groups that a step takes, and those it waits for. Pure.

A group whose first sample was begun under version v is due by step v + eta: at a later step it
would be staler than eta. A group that no worker has begun has no due step yet. A step takes
``groups`` groups. So the groups can be trained in time if, for every t, at most ``groups`` times
the number of steps up to t are due by step t. All decisions here keep that condition true; then the
staleness bound can always be kept, in whatever order groups arrive (the condition for schedules by
earliest deadline of unit tasks).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Due: TypeAlias = Iterable[int] | Mapping[int, int]
"""The due steps of groups, or how many groups are due by each."""


class GroupOrder(StrEnum):
    """The order in which steps take groups.

    ``PROMPT``: by prompt number. ``ARRIVAL``: as they become complete, except that a step waits for
    a group that would become too old.
    """

    PROMPT = "prompt"
    ARRIVAL = "arrival"


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A group that was admitted and is not trained.

    ``due`` is the last step that may take it, None for a group that no worker has begun.
    ``arrived`` is its place among the complete ones, None for an incomplete group.
    """

    ordinal: int
    due: int | None = None
    arrived: int | None = None


def needs(due: Due, *, step: int, groups: int) -> list[tuple[int, int]]:
    """Return (t, how many of the groups due by step t ``step`` has to take), t ascending.

    Groups that later steps have room for are not needed now, and are left out.
    """
    counts = Counter(due)
    steps = sorted(counts)
    totals = itertools.accumulate(counts[each] for each in steps)
    requests = [
        (each, total - groups * (each - step)) for each, total in zip(steps, totals, strict=True)
    ]
    return [(each, count) for each, count in requests if count > 0]


def fits(due: Due, *, step: int, groups: int) -> bool:
    """Say whether all of these groups can be trained in time when ``step`` is the next one."""
    return all(
        each >= step and count <= groups for each, count in needs(due, step=step, groups=groups)
    )


def choose(open_: Sequence[Open], *, step: int, groups: int) -> list[int] | None:
    """Return the ordinals that ``step`` takes, ascending; None while some are missing.

    First come the groups that have to be taken now, in order of arrival; then any other complete
    ones.
    """
    ready = sorted((each for each in open_ if each.arrived is not None), key=_arrival)
    if len(ready) < groups:
        return None
    taken: dict[int, Open] = {}
    for due, count in needs(_due(open_), step=step, groups=groups):
        missing = count - sum(each.due is not None and each.due <= due for each in taken.values())
        fitting = [
            each
            for each in ready
            if each.ordinal not in taken and each.due is not None and each.due <= due
        ]
        if len(fitting) < missing:
            return None
        taken |= {each.ordinal: each for each in fitting[: max(0, missing)]}
    rest = [each.ordinal for each in ready if each.ordinal not in taken]
    return sorted([*taken, *rest[: groups - len(taken)]])


def lacking(
    due: Mapping[int, int], ready: Mapping[int, int], *, complete: int, step: int, groups: int
) -> int:
    """Return how many incomplete groups ``step`` waits for, those due first coming first.

    ``due`` counts the begun groups by their due steps, ``ready`` the complete ones among them;
    ``complete`` is the number of all complete groups. At 0, `choose` finds its groups.
    """
    most = groups - complete
    for each, count in needs(due, step=step, groups=groups):
        most = max(most, count - sum(n for at, n in ready.items() if at <= each))
    return max(0, most)


def steps_without(place: int, *, lacking: int, groups: int) -> int:
    """Return how many steps can do without an incomplete group.

    ``place`` is its number in the order of due steps; the next step waits for ``lacking`` groups.
    """
    return 0 if place < lacking else 1 + (place - lacking) // groups


def block_end(place: int, *, lacking: int, groups: int) -> int:
    """Return the first place after ``place`` that one more step can do without."""
    return lacking + steps_without(place, lacking=lacking, groups=groups) * groups


def oldest_version(due: Due, *, step: int, groups: int, eta: int) -> int:
    """Return the oldest policy version that one more group may begin with.

    ``due`` are the due steps of the groups that were begun. At most ``groups * (eta + 1)`` groups
    may be open, the new one included; then version ``step`` is always possible.
    """
    if not fits(due, step=step, groups=groups):
        return step
    full = [each for each, count in needs(due, step=step, groups=groups) if count == groups]
    return min(step, max(0, step - eta, *(each + 1 - eta for each in full[-1:])))


def _due(open_: Iterable[Open]) -> list[int]:
    return [each.due for each in open_ if each.due is not None]


def _arrival(each: Open) -> int:
    assert each.arrived is not None
    return each.arrived
