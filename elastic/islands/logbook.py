"""The sea's logbook in a store: a chain of records, each created where there is none."""

from __future__ import annotations

from typing import Final

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.store.base import Store
from holdfast.elastic.sea import records
from holdfast.elastic.sea.records import Left, Merged, Part, Record, Why
from holdfast.elastic.sea.view import View

_MOST_BYTES: Final = 16 << 20


class SeaLogbook:
    """The records as far as they were read, for the island of this name.

    ``view`` is their fold. ``merged`` are the merges by tide; ``mine`` the works of this island
    that they name, with the lineage that it had then. ``left`` is the reason of its last leave.
    """

    def __init__(self, store: Store, *, island: str) -> None:
        self._store, self._island = store, island
        self.view = View()
        self.merged: dict[int, Merged] = {}
        self.mine: dict[int, tuple[int, Part]] = {}
        self.left: Why | None = None

    def poll(self) -> bool:
        """Read the records that are new; return whether there was one.

        Raises ``CorruptError`` for one that cannot be read, ``SeaError`` for one that does not
        follow from those before it.
        """
        began = self.view.length
        while (data := self._read(self.view.length)) is not None:
            origin = self._store.where(_name(self.view.length))
            self._note(records.decode_record(data, origin=origin))
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
        return written

    def _read(self, number: int) -> bytes | None:
        try:
            return self._store.read(_name(number), most_bytes=_MOST_BYTES)
        except NotFoundError:
            return None

    def _note(self, record: Record) -> None:
        view = self.view.after(record)
        if isinstance(record, Merged):
            self.merged[record.tide] = record
            for part in record.parts:
                if part.island == self._island:
                    self.mine[record.tide] = self.view.members[part.island].lineage, part
        elif isinstance(record, Left) and record.island == self._island:
            self.left = record.why
        self.view = view


def _name(number: int) -> str:
    return f"logbook/{number:08d}.json"
