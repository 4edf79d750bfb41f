"""The sea's logbook in a store: a chain of records, each created where there is none."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

from holdfast.ckpt.errors import CorruptError, NotFoundError, StoreError
from holdfast.ckpt.store.base import Store
from holdfast.elastic.errors import SeaError
from holdfast.elastic.islands.mailbox import digest_of
from holdfast.elastic.sea import dealing, place, records
from holdfast.elastic.sea.dealing import Block, Blocks
from holdfast.elastic.sea.records import Founded, Left, Merged, Part, Record, Why
from holdfast.elastic.sea.view import View

_MOST_BYTES: Final = 16 << 20
_MOST_MARKS: Final = 4096
"""The newest merges of which the place is known."""

PLACES: Final = "places"
"""The folder with places in the logbook for newcomers."""

_APART: Final = 64
_KEPT_PLACES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """The logbook at one place: its view, the digests of the chain, the reader's last leave."""

    view: View
    before: str = place.START
    digest: str = place.START
    left: Why | None = None


class SeaLogbook:
    """The records as far as they were read, for the island of this name.

    ``merged`` are the merges by tide, where islands meet in pairs those of this one; ``mine`` the
    works of this island that they name, with the lineage that it had then. Blocks of samples that
    it was dealt are kept until `dealt_since` has returned them, also those that a merge has by now:
    a run that went back trains them again.

    The writer of every record whose number is a multiple of ``apart`` leaves a place for newcomers.
    """

    def __init__(self, store: Store, *, island: str, apart: int = _APART) -> None:
        self._store, self._island, self._apart = store, island, apart
        self._clear()

    def _clear(self) -> None:
        self._now = _Mark(view=View())
        self._marks: dict[int, _Mark] = {}
        self.merged: dict[int, Merged] = {}
        self.mine: dict[int, tuple[int, Part]] = {}
        self._hand: tuple[tuple[int, Block], ...] = ()
        self._handed = 0

    @property
    def view(self) -> View:
        """The fold of the records."""
        return self._now.view

    @property
    def left(self) -> Why | None:
        """The reason of this island's last leave, None before one."""
        return self._now.left

    def place(self, tide: int) -> str:
        """Return the place right after the first ``tide`` merges, "" if it is not known."""
        if (mark := self._marks.get(tide)) is None:
            return ""
        found = place.place_of(mark.view, before=mark.before, digest=mark.digest, left=mark.left)
        return place.encode(found)

    def stride(self, tide: int) -> int:
        """Return this island's steps from a tide to its next after the first ``tide`` merges."""
        mark = self._marks.get(tide)
        return (self.view if mark is None else mark.view).stride(self._island)

    def dealt_since(self, count: int) -> Blocks:
        """Return the blocks that this island was dealt after the first ``count`` samples.

        They are those of its present lineage.
        """
        found = []
        for first, (start, stop) in self._hand:
            if first + stop - start > count:
                found.append((start + max(0, count - first), stop))
        self._handed = count
        return dealing.joined(found)

    def resume(self, text: str) -> None:
        """Go on from a place, of which only the first record and the last are read again.

        Raises ``SeaError`` if the records there are others, and for another text.
        """
        at = place.decode(text)
        first, last = self._read(0), self._read(at.length - 1)
        if first is None or last is None or place.chained(at.before, last) != at.digest:
            raise SeaError(
                f"{self._store.where('logbook')} is not the logbook that the island's state is "
                "from: give the meeting place that it had, or begin with another checkpoint "
                "directory"
            )
        founded = records.decode_record(first, origin=self._store.where(_name(0)))
        assert isinstance(founded, Founded)
        view = at.view(founded)
        self._now = _Mark(view=view, before=at.before, digest=at.digest, left=at.left)
        self._marks = {at.tide: self._now}
        if (mine := view.members.get(self._island)) is not None:
            self._hand = _numbered(mine.blocks, mine.dealt)

    def begin_late(self) -> None:
        """Begin at the newest place for newcomers, if there is one: read no record before it.

        For an island that has nothing of the sea yet, so that a long logbook costs it no more than
        a short one.
        """
        for name in reversed(self._store.names(PLACES)):
            try:
                data = self._store.read(f"{PLACES}/{name}", most_bytes=_MOST_BYTES)
                if name.endswith(_ending(data)):
                    self.resume(data.decode())
                    return
            except (NotFoundError, CorruptError, SeaError):
                continue  # removed meanwhile, or of another version: the records have it all

    def reread(self) -> None:
        """Read all records from the first on: one is needed that is older than the begin."""
        self._clear()
        self.poll()

    def forget_before(self, tide: int) -> None:
        """Release the merges before ``tide``, which are adopted."""
        for known in (self.merged, self.mine, self._marks):
            for old in [each for each in list(known) if each < tide]:
                known.pop(old, None)

    def poll(self) -> bool:
        """Read the records that are new; return whether there was one.

        Raises ``CorruptError`` for one that cannot be read, ``SeaError`` for one that does not
        follow from those before it.
        """
        began = self.view.length
        while (data := self._read(self.view.length)) is not None:
            origin = self._store.where(_name(self.view.length))
            self._note(records.decode_record(data, origin=origin), data)
        return self.view.length > began

    def append(self, record: Record) -> bool:
        """Write the next record unless there is one, and read on; return whether it was written.

        False does not say that it is not there: the reply may have been lost. Raises ``SeaError``
        for a record that does not follow, before anything is written.
        """
        self.view.after(record)
        name = _name(record.number)
        written = self._store.replace(name, records.encode(record), expected=None)
        self.poll()
        if written and record.number and record.number % self._apart == 0:
            self._leave_place()
        return written

    def _leave_place(self) -> None:
        """Leave the present place for newcomers, and remove old ones.

        If the store fails there is none, and newcomers begin at the one before.
        """
        now = self._now
        found = place.place_of(now.view, before=now.before, digest=now.digest, left=None)
        data = place.encode(found).encode()
        with contextlib.suppress(StoreError, OSError):
            self._store.write(f"{PLACES}/{now.view.length:08d}{_ending(data)}", [data])
            old = self._store.names(PLACES)[:-_KEPT_PLACES]
            self._store.delete(f"{PLACES}/{name}" for name in old)

    def _read(self, number: int) -> bytes | None:
        try:
            return self._store.read(_name(number), most_bytes=_MOST_BYTES)
        except NotFoundError:
            return None

    def _note(self, record: Record, data: bytes) -> None:
        old, view, left = self._now, self.view.after(record), self.left
        self._note_dealt(old.view, view)
        is_mine = isinstance(record, Merged) and self._is_mine(view, record)
        if isinstance(record, Merged) and is_mine:
            self.merged[record.tide] = record
            for part in record.parts:
                if part.island == self._island:
                    self.mine[record.tide] = old.view.members[part.island].lineage, part
        elif isinstance(record, Left) and record.island == self._island:
            left = record.why
        digest = place.chained(old.digest, data)
        now = _Mark(view=view, before=old.digest, digest=digest, left=left)
        if isinstance(record, Merged) and is_mine:
            self._marks[record.tide + 1] = now
            self._marks.pop(record.tide + 1 - _MOST_MARKS, None)
        self._now = now

    def _is_mine(self, view: View, record: Merged) -> bool:
        """Return whether this island adopts a merge: with pairs only its own meetings."""
        return not view.is_paired or any(part.island == self._island for part in record.parts)

    def _note_dealt(self, old: View, view: View) -> None:
        """Keep what a record has dealt to this island."""
        mine, before = view.members.get(self._island), old.members.get(self._island)
        if mine is None:
            return
        known = before.dealt if before is not None and before.lineage == mine.lineage else None
        if known is None:
            self._hand, self._handed, known = (), 0, 0
        if mine.dealt > known:
            kept = [
                each for each in self._hand if each[0] + dealing.count([each[1]]) > self._handed
            ]
            _, new = dealing.cut(mine.blocks, known - mine.dealt + dealing.count(mine.blocks))
            self._hand = (*kept, *_numbered(new, mine.dealt))


def _numbered(blocks: Blocks, dealt: int) -> tuple[tuple[int, Block], ...]:
    """Return the last blocks of ``dealt`` samples, each with the number of samples before it."""
    found, first = [], dealt - dealing.count(blocks)
    for block in blocks:
        found.append((first, block))
        first += dealing.count([block])
    return tuple(found)


def _name(number: int) -> str:
    return f"logbook/{number:08d}.json"


def _ending(data: bytes) -> str:
    """Return the end of the name of a place's file, by which damage is seen."""
    return f"-{digest_of(data)}.json"
