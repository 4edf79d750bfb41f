"""The next record of a sea's logbook, decided from its view and the works that are there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from holdfast.elastic.sea.records import Left, Merged, Part, Record, Work
from holdfast.elastic.sea.settings import Islands
from holdfast.elastic.sea.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """Times of the decider's own clock, in seconds, by island.

    ``heard``: when an island was last heard of, at first when the decider read its `Entered`.
    ``arrived``: when the decider first saw its work for the next merge. An island that is missing
    here was heard of just now.
    """

    heard: Mapping[str, float] = field(default_factory=dict)
    arrived: Mapping[str, float] = field(default_factory=dict)


def decide(
    view: View, works: Iterable[Work], *, now: float, since: Since, islands: Islands, me: str
) -> Record | None:
    """Return the record that ``me`` may write at number ``view.length``, None to wait.

    ``works`` are those read from all islands, of any portion; of several of one island the newest
    counts. ``now`` must have been taken before the decider looked for works and signs of life: if
    it was then stopped for minutes, it judges nobody by what it did not see.
    """
    if view.founded is None:
        return None
    if view.is_paired:
        return _decide_meeting(view, works, now=now, since=since, islands=islands, me=me)
    if me not in view.members:
        return None
    parts = _parts(view, works)
    ready = _is_ready(view, parts, now=now, since=since)
    if left := _astray(view, parts, may_vote=ready):
        return left
    here = {part.island for part in parts}
    if silent := _silent(view, here | {me}, now=now, since=since, islands=islands):
        return silent
    if not ready or (view.tide == 0 and len(view.members) < view.settings.founders):
        return None
    return Merged(
        number=view.length,
        tide=view.tide,
        portion=view.portion,
        parts=tuple(parts),
        whole=view.whole(parts),
    )


def _decide_meeting(
    view: View, works: Iterable[Work], *, now: float, since: Since, islands: Islands, me: str
) -> Record | None:
    """Return the meeting that ``me`` may write, of its own next tide.

    An island that has ended meets nobody, but still puts out those that are silent: it waits until
    all others have ended.
    """
    here = {work.island: work for work in works if view.fits(work)}
    if silent := _silent(view, here.keys() | {me}, now=now, since=since, islands=islands):
        return silent
    if view.tide == 0 and len(view.members) < view.settings.founders:
        return None
    if (own := here.get(me)) is None:
        return None
    due = [here.get(island) for island in sorted(view.awaited(me))]
    found = [work for work in due if work is not None and work.tide == own.tide]
    if len(found) < len(due):
        return None  # the partner has sent none yet, or is at an older tide
    parts = tuple(work.part for work in found)
    return Merged(
        number=view.length,
        tide=own.tide,
        portion=own.portion,
        parts=parts,
        whole=view.whole(parts),
    )


def _silent(
    view: View, others: AbstractSet[str], *, now: float, since: Since, islands: Islands
) -> Left | None:
    """Return the leave of a member, not of ``others``, of which nothing was heard for too long."""
    for island in sorted(view.members.keys() - others):
        if now - since.heard.get(island, now) > islands.patience_s:
            return Left(number=view.length, island=island, why="silent")
    return None


def _parts(view: View, works: Iterable[Work]) -> list[Part]:
    """Return the newest fitting work of each member, by the islands' names."""
    newest: dict[str, Work] = {}
    for work in works:
        if view.fits(work):
            old = newest.get(work.island)
            if old is None or (work.tide, work.digest) > (old.tide, old.digest):
                newest[work.island] = work
    return [newest[island].part for island in sorted(newest)]


def _is_ready(view: View, parts: Sequence[Part], *, now: float, since: Since) -> bool:
    """Return whether the works are enough, and the others had their time."""
    if not view.is_enough(parts):
        return False
    if len(parts) == len(view.members):
        return True
    come, needed = 0, (view.settings.share or 0.0) * view.whole(parts)
    for part in sorted(parts, key=lambda each: since.arrived.get(each.island, now)):
        come += part.weight
        if come >= needed:
            return now - since.arrived.get(part.island, now) >= view.settings.grace_s
    return False


def _astray(view: View, parts: Sequence[Part], *, may_vote: bool) -> Left | None:
    """Return the leave of an island whose weights are not the sea's.

    A digest that was agreed upon decides at once; a vote waits until the works are enough.
    """
    known = [part for part in parts if part.base in view.states[view.portion]]
    for island in view.astray(view.portion, parts if may_vote else known):
        base = next(part.base for part in parts if part.island == island)
        seen = tuple(part for part in parts if part.base == base)
        return Left(
            number=view.length, island=island, why="astray", portion=view.portion, seen=seen
        )
    return None
