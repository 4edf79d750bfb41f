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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


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


def needs(due: Iterable[int], *, step: int, groups: int) -> list[tuple[int, int]]:
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


def fits(due: Iterable[int], *, step: int, groups: int) -> bool:
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
    taken: list[Open] = []
    for due, count in needs(_due(open_), step=step, groups=groups):
        missing = count - sum(each.due is not None and each.due <= due for each in taken)
        fitting = [
            each for each in ready if each not in taken and each.due is not None and each.due <= due
        ]
        if len(fitting) < missing:
            return None
        taken += fitting[: max(0, missing)]
    rest = [each for each in ready if each not in taken]
    return sorted(each.ordinal for each in (*taken, *rest[: groups - len(taken)]))


def urgency(open_: Sequence[Open], *, step: int, groups: int) -> dict[int, int]:
    """Return, for every group that is not complete, how many steps can still do without it.

    ``step`` waits for the groups with 0: once they are complete, `choose` finds its groups.
    """
    missing = sorted((each for each in open_ if each.arrived is None), key=_deadline)
    ready = [each for each in open_ if each.arrived is not None]
    first = groups - len(ready)
    for due, count in needs(_due(open_), step=step, groups=groups):
        first = max(first, count - sum(each.due is not None and each.due <= due for each in ready))
    first = max(0, first)
    return {
        each.ordinal: 0 if index < first else 1 + (index - first) // groups
        for index, each in enumerate(missing)
    }


def oldest_version(due: Collection[int], *, step: int, groups: int, eta: int) -> int:
    """Return the oldest policy version that one more group may begin with.

    ``due`` are the due steps of the groups that were begun. At most ``groups * (eta + 1)`` groups
    may be open, the new one included; then version ``step`` is always possible.
    """
    oldest = max(0, step - eta)
    return next(
        version
        for version in itertools.count(oldest)
        if version >= step or fits((*due, version + eta), step=step, groups=groups)
    )


def _due(open_: Iterable[Open]) -> list[int]:
    return [each.due for each in open_ if each.due is not None]


def _arrival(each: Open) -> int:
    assert each.arrived is not None
    return each.arrived


def _deadline(each: Open) -> tuple[bool, int, int]:
    return each.due is None, each.due or 0, each.ordinal
