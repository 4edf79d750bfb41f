"""The newest step at which only whole places of a pipeline are lost, for a restore without them.

Places are the indexes along the mesh's axis ``pp``; a rank may have several stages. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import msgspec

from holdfast.ckpt.memory.records import RestorePoint
from holdfast.ckpt.types import Json

Needs = Mapping[int, Set[int]]
"""Each place of the pipeline whose stages can be set from others, with the places it needs."""


def needs_of(told: Json) -> Needs:
    """Return the needs that a trainer announced; none if it announced nothing readable."""
    try:
        found = msgspec.convert(told, dict[str, list[int]])
        return {int(place): frozenset(others) for place, others in found.items()}
    except (msgspec.ValidationError, ValueError):
        return {}


def announced(needs: Needs) -> dict[str, Json]:
    """Return the needs as a trainer announces them."""
    return {str(place): sorted(others) for place, others in sorted(needs.items())}


def without_lost(
    points: Sequence[RestorePoint],
    remnants: Iterable[RestorePoint],
    *,
    needs: Needs,
    beyond: int,
) -> tuple[RestorePoint | None, str]:
    """Return the point that can do without the fewest places of the pipeline, or why there is none.

    ``points`` are the complete points, ``remnants`` what is left of all snapshots. A place that
    lost a rank is left out as a whole. A newer step that fewer places have come to is not taken;
    of points with equally many lost places, the newest is. None if the newest complete point, or
    the beginning, is at most ``beyond`` steps older, or if a lost place cannot be set from others.
    If a generation has a complete point, its newer snapshots lack what some ranks have not yet
    written; nothing of it is lost.
    """
    newest = max((point.step for point in points), default=0)
    complete = {point.world.generation for point in points}
    best: tuple[tuple[int, int], RestorePoint] | None = None
    why = ""
    for remnant in remnants:
        if remnant.step - beyond <= newest or remnant.world.generation in complete:
            continue
        place_of = remnant.world.place_of
        lost = {place_of(rank) for rank in remnant.lost}
        if not lost:
            continue
        if objection := _objection(lost, needs):
            why = why or f"step {remnant.step}: {objection}"
            continue
        sources = [each for each in remnant.sources if place_of(each.rank) not in lost]
        rating = (-len(lost), remnant.step)
        if best is None or rating > best[0]:
            point = RestorePoint(world=remnant.world, step=remnant.step, sources=tuple(sources))
            best = (rating, point)
    return (None, why) if best is None else (best[1], "")


def _objection(lost: Set[int], needs: Needs) -> str:
    """Return why the lost places cannot be set from the others, "" if they can."""
    for place in sorted(lost):
        if place not in needs:
            return f"the stages of place {place} of the pipeline are lost, and nothing is like them"
        if missing := sorted(needs[place] & lost):
            return (
                f"places {place} and {missing[0]} of the pipeline are lost, which lie side by side"
            )
    return ""


def lost_places(point: RestorePoint) -> list[int]:
    """Return the places of the pipeline that a point does without, in order."""
    return sorted({point.world.place_of(rank) for rank in point.lost})
