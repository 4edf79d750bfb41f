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
    """Return the newest point that can do without places of the pipeline, and the reason.

    ``points`` are the complete points, ``remnants`` what is left of all snapshots. A place that
    lost a rank is left out as a whole. None if the newest complete point, or the beginning, is at
    most ``beyond`` steps older, or if a lost place cannot be set from the others.
    """
    newest = max((point.step for point in points), default=0)
    best: RestorePoint | None = None
    why = ""
    for remnant in remnants:
        if remnant.step - beyond <= newest or (best is not None and remnant.step <= best.step):
            continue
        place_of = remnant.world.place_of
        lost = {place_of(rank) for rank in remnant.lost}
        if not lost:
            continue
        if objection := _objection(lost, needs):
            why = why or f"step {remnant.step}: {objection}"
            continue
        sources = [each for each in remnant.sources if place_of(each.rank) not in lost]
        best = RestorePoint(world=remnant.world, step=remnant.step, sources=tuple(sources))
    return best, "" if best is not None else why


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
