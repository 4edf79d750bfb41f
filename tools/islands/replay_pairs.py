"""The meetings of a logbook whose islands meet in pairs, made once more from their payloads.

Each island has weights of its own, so each is replayed by itself: an island states the digest of
its weights with every work, and that of the result of a meeting with its next work of the portion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.elastic.sea.records import Entered, Left, Merged, Part, Record
from holdfast.tools.islands.replay import Outcome, Replayed


class ReplayedIsland(Protocol):
    """The weights and momentum of one island."""

    def digest(self, portion: int) -> str:
        """Return the digest of a portion, as the island's works state it."""

    def meet(self, record: Merged, payloads: Sequence[bytes], *, own: int) -> None:
        """Move a portion by a meeting; ``own`` is the place of the island's payload."""


@dataclass(slots=True)
class _Track:
    """An island that is replayed from its tide ``since``; ``last`` has results to be judged."""

    sea: ReplayedIsland
    since: int
    unknown: set[int] = field(default_factory=set)
    last: dict[int, _Meeting] = field(default_factory=dict)


@dataclass(slots=True)
class _Meeting:
    """A meeting that was repeated, by the islands whose results are not stated yet."""

    found: Replayed
    open: set[str] = field(default_factory=set)


def replay_pairs(
    records: Sequence[Record],
    islands: Mapping[str, tuple[ReplayedIsland, int]],
    payload: Callable[[Part], bytes],
    *,
    progress: Callable[[int], None] = lambda merges: None,
) -> list[Replayed]:
    """Repeat the meetings of a logbook; return one outcome for each.

    ``islands`` are those whose weights are known, with the tide from which on. A meeting is
    verified once every one of them that was in it has stated its result.
    """
    tracks = {name: _Track(sea, since) for name, (sea, since) in islands.items()}
    first = {each.number for each in records if isinstance(each, Entered) and each.tide == 0}
    found: list[Replayed] = []
    for record in records:
        match record:
            case Entered(island=name, lineage=lineage) if lineage not in first:
                if name in tracks and record.tide > tracks[name].since:
                    tracks.pop(name, None)  # it was given another island's weights
            case Left(island=name) if name in tracks:
                for portion, part in enumerate(record.last):
                    _judge(tracks[name], portion, part)
            case Merged():
                found.append(_repeat(record, tracks, payload))
                progress(1)
    return found


def _repeat(
    record: Merged, tracks: Mapping[str, _Track], payload: Callable[[Part], bytes]
) -> Replayed:
    names = tuple(part.island for part in record.parts)
    found = Replayed(tide=record.tide, portion=record.portion, islands=names, outcome="no weights")
    here = [(at, part) for at, part in enumerate(record.parts) if part.island in tracks]
    later = [(at, part) for at, part in here if record.tide >= tracks[part.island].since]
    for _, part in later:
        _judge(tracks[part.island], record.portion, part)
    if here and not later:
        found.outcome = "earlier"
        return found
    try:
        payloads = [payload(part) for part in record.parts]
    except (NotFoundError, CorruptError) as error:
        found.outcome = _missing(error)
        found.why = str(error)
        for _, part in later:
            tracks[part.island].unknown.add(record.portion)
        return found
    meeting = _Meeting(found)
    for at, part in later:
        track = tracks[part.island]
        if record.portion not in track.unknown:
            track.sea.meet(record, payloads, own=at)
            track.last[record.portion] = meeting
            meeting.open.add(part.island)
            found.outcome = "repeated"
    return found


def _missing(error: Exception) -> Outcome:
    return "no payload" if isinstance(error, NotFoundError) else "damaged"


def _judge(track: _Track, portion: int, part: Part) -> None:
    """Compare the present weights of an island with those that its work states."""
    if portion in track.unknown:
        return
    meeting, mine = track.last.pop(portion, None), track.sea.digest(portion)
    if part.state != mine:
        track.unknown.add(portion)
        if meeting is not None:
            meeting.found.outcome = "differs"
            meeting.found.why = (
                f"{part.island} states the digest {part.state}, the replay has {mine}"
            )
    elif meeting is not None:
        meeting.open.discard(part.island)
        if not meeting.open and meeting.found.outcome == "repeated":
            meeting.found.outcome = "verified"
