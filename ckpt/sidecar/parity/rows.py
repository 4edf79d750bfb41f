"""The parity rows that a node holds, in files of its arena, which outlive the sidecar.

The builder takes a file and fills the row; the row enters the table when it is sealed. Files of
rows that are no longer needed are reused.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.memory.arena import Arena
from holdfast.ckpt.memory.fixed_files import fixed_bytes_in, make_fixed, numbered, sweep_fixed
from holdfast.ckpt.memory.records import ParityEntry, SnapshotWorld
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.pages import is_no_room
from holdfast.ckpt.native.sums import Sums, sums_of
from holdfast.ckpt.parity.row_file import ROW_SUFFIX, RowFile, no_room_for_row
from holdfast.ckpt.sidecar.core.book import SnapshotKey

RowPlace: TypeAlias = tuple[int, int]
"""(stripe, row)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSize:
    """The length of a row, and the fixed part with which it begins (of 0 bytes: none)."""

    nbytes: int
    fixed: str = ""
    fixed_bytes: int = 0

    @property
    def own_bytes(self) -> int:
        """The length of the row without its fixed part."""
        return self.nbytes - self.fixed_bytes

    def fits(self, file: RowFile) -> bool:
        """Return whether a file holds the row and wastes at most as much again."""
        return self._fits(file.fixed_name, file.capacity - file.fixed_bytes)

    def is_like(self, other: RowSize) -> bool:
        """Return whether a file just large enough for ``other`` fits this row."""
        return self._fits(other.fixed, other.own_bytes)

    def _fits(self, fixed: str, capacity: int) -> bool:
        own = self.own_bytes
        return self.fixed == fixed and own <= capacity <= 2 * own + (1 << 16)


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

    @property
    def fixed_name(self) -> str:
        """The name of the fixed part with which it begins, "" for none."""
        return self.file.fixed_name if self.file is not None else ""

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
        self._sizes: tuple[RowSize, ...] = ()
        self._fixed: dict[str, Sums] = {}
        self._filling: set[str] = set()
        self._used: Counter[str] = Counter()
        self._attempts: Counter[str] = Counter()
        self._lock = threading.Lock()

    # -- files -----------------------------------------------------------------------------------

    def expect(self, sizes: Sequence[RowSize], *, keep: int) -> None:
        """Record the lengths of a snapshot's rows here, and the number of kept snapshots."""
        with self._lock:
            self._sizes, self._keep = tuple(size for size in sizes if size.nbytes), keep
        self._sweep_fixed()

    def missing(self) -> RowSize | None:
        """Return the length for which a file is missing, None if there is none.

        The target is as many files in all as hold the kept snapshots and one more. If the
        lengths have changed, files of other lengths must go first.
        """
        with self._lock:
            files = [*self._kept_files(), *self._free, *self._building]
            if len(files) >= len(self._sizes) * (self._keep + 1):
                return None
            for size in set(self._sizes):
                if size.fixed and size.fixed not in self._fixed:
                    continue  # the first row that is built fills the fixed part
                wanted = sum(size.is_like(each) for each in self._sizes) * (self._keep + 1)
                if sum(size.fits(file) for file in files) < wanted:
                    return size
        return None

    def make(self, size: RowSize) -> None:
        """Make a free file ahead. Raises ``CapacityError``."""
        file = self._create(size)
        with self._lock:
            self._free.append(file)

    def _kept_files(self) -> list[RowFile]:
        files = (row.file for row in (*self._rows.values(), *self._leaving))
        return [file for file in files if file is not None and not file.borrowed]

    def take(self, size: RowSize) -> RowFile:
        """Return a file for a row, without a label, its bytes undefined.

        Its fixed part is complete if `fixed_sums` knows it, and to be written otherwise. Raises
        ``CapacityError`` when shared memory has no room for another file.
        """
        with self._lock:
            fitting = [file for file in self._free if size.fits(file)]
            if fitting and (not size.fixed or size.fixed in self._fixed):
                file = min(fitting, key=lambda each: each.capacity)
                self._free.remove(file)
                self._building.add(file)
                file.clear()
                return file
            unfit = [file for file in self._free if not self._is_expected(file)]
            self._free = [file for file in self._free if file not in unfit]
        for each in unfit:  # the state has another size now
            each.discard()
        self._sweep_fixed()
        file = self._create(size)
        with self._lock:
            self._building.add(file)
        return file

    def _is_expected(self, file: RowFile) -> bool:
        return any(size.fits(file) for size in self._sizes) and not file.borrowed

    def _create(self, size: RowSize) -> RowFile:
        directory = self._arena.directory
        if size.fixed:
            try:
                make_fixed(directory, size.fixed, ROW_SUFFIX, size.fixed_bytes)
            except OSError as error:
                if not is_no_room(error):
                    raise
                raise no_room_for_row(directory, size.fixed_bytes) from error
        while True:
            with self._lock:
                self._number += 1
                number = self._number
            path = numbered(directory, number, ROW_SUFFIX, fixed=size.fixed)
            try:
                file = RowFile.create(path, size.own_bytes)
            except FileExistsError:
                continue
            if not size.fixed or size.fixed in self._fixed:
                return file
            file.close()
            return RowFile.open(path, fill=True)

    # -- fixed parts -----------------------------------------------------------------------------

    def fixed_name(self, contents: str) -> str:
        """Return the name of the fixed part with these contents.

        It is another one after damage, and after a row that did not fill it: a thread of that row
        may still write to its file.
        """
        with self._lock:
            return f"{contents}-{self._attempts[contents]}"

    def fixed_sums(self, name: str) -> Sums | None:
        """Return the sums of a complete fixed part, None for one that is not there."""
        with self._lock:
            return self._fixed.get(name)

    def use_fixed(self, name: str) -> bool:
        """Keep a fixed part for a row in progress, until `end_use`.

        The row fills one that is not complete. Returns False if another row is filling it.
        """
        with self._lock:
            if name in self._filling:
                return False
            if name not in self._fixed:
                self._filling.add(name)
            self._used[name] += 1
            return True

    def end_use(self, name: str, *, sums: Sums | None = None) -> None:
        """Let go of a fixed part; ``sums`` are those of one that the row has filled."""
        with self._lock:
            self._used -= Counter([name])
            if sums is not None:
                self._fixed[name] = sums
            elif name in self._filling:
                self._attempts[_contents_of(name)] += 1
            self._filling.discard(name)

    def distrust_fixed(self, name: str) -> None:
        """Forget a fixed part that is damaged: the next row has another."""
        with self._lock:
            if self._fixed.pop(name, None) is not None:
                self._attempts[_contents_of(name)] += 1

    def _sweep_fixed(self) -> None:
        """Remove the fixed parts that no row names any more."""
        with self._lock:
            files = (*self._kept_files(), *self._free, *self._building)
            named = {file.fixed_name for file in files} | {size.fixed for size in self._sizes}
            named |= self._used.keys()
            self._fixed = {name: sums for name, sums in self._fixed.items() if name in named}
            sweep_fixed(self._arena.directory, ROW_SUFFIX, named=named)

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
            except (CorruptError, FileNotFoundError):
                path.unlink(missing_ok=True)
                continue
            label = file.read_label(run=self._arena.run)
            if label is None or label.entry.generation not in worlds:
                file.discard()
                continue
            self.seal_again(file, label.entry)
            self._readopt_fixed(file, label.entry)
            found.append((label.entry, label.protected))
        named = {row.file.fixed_name for row in self._rows.values() if row.file is not None}
        sweep_fixed(self._arena.directory, ROW_SUFFIX, named=named, unfinished=True)
        return found

    def _readopt_fixed(self, file: RowFile, entry: ParityEntry) -> None:
        """Take over the fixed part of a row, where the whole row is intact."""
        name = file.fixed_name
        if name and name not in self._fixed and crc32c(file.row(entry.nbytes)) == entry.crc32c:
            self._fixed[name] = sums_of(file.row(file.fixed_bytes))

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
            own_bytes = sum(file.file_bytes for file in files)
        return own_bytes + fixed_bytes_in(self._arena.directory, ROW_SUFFIX)


def _contents_of(name: str) -> str:
    return name.rpartition("-")[0]
