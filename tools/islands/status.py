"""The status of a sea, from its logbook and the files beside it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from holdfast.elastic.islands.messages import Sign
from holdfast.elastic.sea import payload
from holdfast.elastic.sea.portions import portions_of
from holdfast.elastic.sea.records import Founded, Left, Record, Work
from holdfast.elastic.sea.view import View
from holdfast.tools.islands.lines import LineStatus, lines_of

FORMER: Final = 8
"""The islands that left of which the status tells, the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """The files of a sea as they were read at one moment, ``at_s`` on the reader's own clock."""

    at_s: float
    records: tuple[Record, ...]
    view: View
    works: Mapping[str, tuple[Work, ...]]
    signs: Mapping[str, Sign]
    asked: tuple[str, ...]


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An island that takes part.

    ``work_bytes`` is the size of its payload for the next merge, None while there is none. ``sign``
    is its last sign of life, with its step, the merges that it has adopted, the seconds that it
    waits by now and the bytes of payloads; ``heard_s`` is the longest that the sign can be old,
    None if it did not change while this command listened. ``up`` and ``down`` are the directions of
    its line.
    """

    island: str
    weight: int
    share: float
    work_bytes: int | None
    sign: Sign | None
    heard_s: float | None
    up: LineStatus
    down: LineStatus


class FormerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An island that left, and why."""

    island: str
    why: str


class SeaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a sea.

    ``tide`` merges are done; the next is of ``portion`` and waits for the islands of
    ``waits_for``. ``asking`` are islands without a state, which ask for weights. An island sends
    ``sent_bytes`` for a tide of the largest portion, and receives ``received_bytes`` if all take
    part. ``listened_s`` is the time between the two looks, ``tides_seen`` the merges in it.
    """

    sea: str
    records: int
    tide: int
    portion: int
    every: int
    portions: int
    bits: int
    share: float | None
    parameters: int
    elements: int
    members: tuple[MemberStatus, ...]
    former: tuple[FormerStatus, ...]
    waits_for: tuple[str, ...]
    asking: tuple[str, ...]
    sent_bytes: int
    received_bytes: int
    listened_s: float
    tides_seen: int

    @property
    def tide_s(self) -> float | None:
        """The seconds of a tide while this command listened, None if it saw no merge."""
        return self.listened_s / self.tides_seen if self.tides_seen else None


def status(sea: str, before: Glance, after: Glance) -> SeaStatus:
    """Return the status from two looks at a sea that was founded before the second."""
    view = after.view
    assert view.founded is not None
    whole = sum(view.weights.values())
    waiting = {island: _fitting(view, works) for island, works in after.works.items()}
    alive, listened_s = heard(before, after), after.at_s - before.at_s
    counts = elements_of(view.founded)
    largest = max(
        sum(payload.nbytes(counts[at], view.settings.bits) for at in portion)
        for portion in portions_of(counts, view.settings.portions)
    )
    received = largest * max(len(view.members) - 1, 0)
    lines = {
        island: lines_of(
            after.signs.get(island),
            stride=view.stride(island),
            sent_bytes=largest,
            received_bytes=received,
        )
        for island in view.members
    }
    members = tuple(
        MemberStatus(
            island=island,
            weight=member.weight,
            share=member.weight / whole,
            work_bytes=found.nbytes if (found := waiting.get(island)) else None,
            sign=after.signs.get(island),
            heard_s=listened_s if island in alive else None,
            up=lines[island][0],
            down=lines[island][1],
        )
        for island, member in view.members.items()
    )
    return SeaStatus(
        sea=sea,
        records=view.length,
        tide=view.tide,
        portion=view.portion,
        every=view.settings.every,
        portions=view.settings.portions,
        bits=view.settings.bits,
        share=view.settings.share,
        parameters=len(counts),
        elements=sum(counts),
        members=members,
        former=_former(after.records, view),
        waits_for=tuple(each.island for each in members if each.work_bytes is None),
        asking=after.asked,
        sent_bytes=largest,
        received_bytes=received,
        listened_s=listened_s,
        tides_seen=view.tide - before.view.tide,
    )


def heard(before: Glance, after: Glance) -> set[str]:
    """Return the islands that gave a sign of life between two looks."""
    return {island for island, sign in after.signs.items() if sign != before.signs.get(island)}


def elements_of(founded: Founded) -> list[int]:
    """Return the number of elements of each parameter."""
    return [math.prod(each.shape) for each in founded.parameters]


def _fitting(view: View, works: Sequence[Work]) -> Work | None:
    """Return the work that the next merge may name, None while there is none."""
    return max((work for work in works if view.fits(work)), key=lambda w: w.tide, default=None)


def _former(records: Sequence[Record], view: View) -> tuple[FormerStatus, ...]:
    """Return the islands that left and did not come back, the last to leave first."""
    why = {each.island: each.why for each in records if isinstance(each, Left)}
    left = [each for each in reversed(list(view.former)) if each in why]
    return tuple(FormerStatus(island=each, why=why[each]) for each in left[:FORMER])
