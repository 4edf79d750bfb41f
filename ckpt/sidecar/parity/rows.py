"""The parity rows that a node holds, in files of its arena, which outlive the sidecar.

The builder takes a file and fills the row; the row enters the table when it is sealed. Files of
rows that are no longer needed are reused.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.memory.arena import HEADER_BYTES, Arena
from holdfast.ckpt.memory.records import ParityEntry, SnapshotWorld
from holdfast.ckpt.parity.row_file import ROW_SUFFIX, RowFile
from holdfast.ckpt.sidecar.core.book import SnapshotKey

RowPlace: TypeAlias = tuple[int, int]
"""(stripe, row)."""


@dataclass(slots=True, kw_only=True, eq=False)
class ParityRow:
    """A sealed parity row. A reader of ``buffer`` holds ``lock``.

    ``file`` and ``buffer`` are None for a row of no bytes, and once the row was dropped. A row with
    ``pins`` keeps its bytes until it has none.
    """

    key: SnapshotKey
    place: RowPlace
    entry: ParityEntry
    file: RowFile | None = None
    buffer: memoryview | None = None
    pins: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.entry.nbytes

    def part(self, at: int, nbytes: int) -> bytes:
        """Return a copy of some bytes; call it under ``lock``. Raises ``NotFoundError``."""
        if self.buffer is None and self.nbytes:
            raise NotFoundError(f"parity row {self.place} of step {self.key[1]} was released")
        return b"" if self.buffer is None else self.buffer[at : at + nbytes].tobytes()


class Parities:
    """All sealed parity rows of this node, and the files for more. Safe between threads."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._rows: dict[tuple[SnapshotKey, RowPlace], ParityRow] = {}
        self._free: list[RowFile] = []
        self._building: set[RowFile] = set()
        self._leaving: list[ParityRow] = []
        self._number, self._keep = 0, 0
        self._sizes: tuple[int, ...] = ()
        self._lock = threading.Lock()

    # -- files -----------------------------------------------------------------------------------

    def expect(self, sizes: Sequence[int], *, keep: int) -> None:
        """Record the lengths of a snapshot's rows here, and the number of kept snapshots."""
        with self._lock:
            self._sizes, self._keep = tuple(size for size in sizes if size), keep

    def missing_bytes(self) -> int:
        """Return the length for which a file is missing, 0 for none.

        The target is as many files in all as hold the kept snapshots and one more. If the
        lengths have changed, files of other lengths must go first.
        """
        with self._lock:
            capacities = [
                file.capacity for file in (*self._kept_files(), *self._free, *self._building)
            ]
            if len(capacities) >= len(self._sizes) * (self._keep + 1):
                return 0
            for size in set(self._sizes):
                wanted = sum(_fits(each, size) for each in self._sizes) * (self._keep + 1)
                if sum(_fits(capacity, size) for capacity in capacities) < wanted:
                    return size
        return 0

    def make(self, nbytes: int) -> None:
        """Make a free file ahead. Raises ``CapacityError``."""
        file = self._create(nbytes)
        with self._lock:
            self._free.append(file)

    def _kept_files(self) -> list[RowFile]:
        files = (row.file for row in (*self._rows.values(), *self._leaving))
        return [file for file in files if file is not None and not file.borrowed]

    def take(self, nbytes: int) -> RowFile:
        """Return a file for a row, without a label, its bytes undefined.

        Raises ``CapacityError`` when shared memory has no room for another one.
        """
        with self._lock:
            fitting = [file for file in self._free if _fits(file.capacity, nbytes)]
            if fitting:
                file = min(fitting, key=lambda each: each.capacity)
                self._free.remove(file)
                self._building.add(file)
                file.clear()
                return file
            unfit = [file for file in self._free if not self._is_expected(file)]
            self._free = [file for file in self._free if file not in unfit]
        for each in unfit:  # the state has another size now
            each.discard()
        file = self._create(nbytes)
        with self._lock:
            self._building.add(file)
        return file

    def _is_expected(self, file: RowFile) -> bool:
        fits = any(_fits(file.capacity, size) for size in self._sizes)
        return fits and not file.borrowed

    def _create(self, nbytes: int) -> RowFile:
        while True:
            with self._lock:
                self._number += 1
                number = self._number
            try:
                return RowFile.create(self._arena.directory / f"{number:06d}{ROW_SUFFIX}", nbytes)
            except FileExistsError:
                continue

    def give_back(self, file: RowFile) -> None:
        """Drop a file of a row in progress; a thread may still write to its mapping."""
        with self._lock:
            self._building.discard(file)
        file.discard()

    def seal(self, file: RowFile | None, entry: ParityEntry) -> ParityRow:
        """Label a complete row and enter it in the table."""
        key, place = (entry.generation, entry.step), (entry.stripe, entry.row)
        row = ParityRow(key=key, place=place, entry=entry, file=file)
        if file is not None:
            file.label(entry, run=self._arena.run)
            row.buffer = file.row(entry.nbytes)
        with self._lock:
            if file is not None:
                self._building.discard(file)
            self._rows[key, place] = row
        return row

    def mark_protected(self, key: SnapshotKey) -> None:
        """Mark in the rows of a snapshot that it is protected, for a restarted sidecar."""
        for row in self.sealed(key):
            if row.file is not None:
                row.file.mark_protected()

    def readopt(self, worlds: Mapping[int, SnapshotWorld]) -> list[tuple[ParityEntry, bool]]:
        """Take over the sealed rows that an earlier process left; remove the other files.

        ``worlds`` are the groups by generation. Returns the rows' entries, each with whether the
        whole snapshot was known to be protected.
        """
        found = []
        for path in sorted(self._arena.directory.glob(f"*{ROW_SUFFIX}")):
            try:
                file = RowFile.open(path)
            except (CorruptError, ValueError):
                path.unlink(missing_ok=True)
                continue
            label = file.read_label(run=self._arena.run)
            if label is None or label.entry.generation not in worlds:
                file.discard()
                continue
            self.seal_again(file, label.entry)
            found.append((label.entry, label.protected))
        return found

    def seal_again(self, file: RowFile, entry: ParityEntry) -> None:
        """Enter a labelled file in the table unchanged."""
        key, place = (entry.generation, entry.step), (entry.stripe, entry.row)
        row = ParityRow(key=key, place=place, entry=entry, file=file, buffer=file.row(entry.nbytes))
        with self._lock:
            self._rows[key, place] = row

    # -- rows ------------------------------------------------------------------------------------

    def get(self, key: SnapshotKey, place: RowPlace) -> ParityRow | None:
        """Return a sealed row."""
        return self._rows.get((key, place))

    def sealed(self, key: SnapshotKey | None = None) -> list[ParityRow]:
        """Return the rows of one snapshot or of all."""
        with self._lock:
            return [row for row in self._rows.values() if key in (None, row.key)]

    def drop(self, key: SnapshotKey) -> None:
        """Forget a snapshot's rows; their files become free, or are removed if they do not fit."""
        with self._lock:
            dropped = [self._rows.pop(each) for each in list(self._rows) if each[0] == key]
            self._leaving += [row for row in dropped if row.pins]
            free = [row for row in dropped if not row.pins]
        for row in free:
            self._free_file(row)

    def pin(self, key: SnapshotKey) -> list[ParityRow]:
        """Return a snapshot's rows; their bytes stay until `unpin`, even if rows are dropped."""
        with self._lock:
            rows = [row for row in self._rows.values() if row.key == key]
            for row in rows:
                row.pins += 1
            return rows

    def unpin(self, rows: Sequence[ParityRow]) -> None:
        """Release pinned rows."""
        with self._lock:
            for row in rows:
                row.pins -= 1
            free = [row for row in self._leaving if not row.pins]
            self._leaving = [row for row in self._leaving if row.pins]
        for row in free:
            self._free_file(row)

    def _free_file(self, row: ParityRow) -> None:
        file = row.file
        if file is None:
            return
        if not row.lock.acquire(blocking=False):
            file.discard()  # a reader has it: it must not be overwritten
            return
        row.buffer, row.file = None, None
        row.lock.release()
        with self._lock:
            is_wanted = self._is_expected(file) and len(self._free) < self._most_free()
            if is_wanted:
                file.clear()
                self._free.append(file)
        if not is_wanted:
            file.discard()

    def _most_free(self) -> int:
        return len(self._sizes)

    def nbytes(self) -> int:
        """Return the shared memory in use, including files of rows in progress and free ones."""
        with self._lock:
            files = (*self._kept_files(), *self._free, *self._building)
            return sum(HEADER_BYTES + file.capacity for file in files)


def _fits(capacity: int, nbytes: int) -> bool:
    """Return whether a file holds a row and wastes at most as much again."""
    return nbytes <= capacity <= 2 * nbytes + (1 << 16)
