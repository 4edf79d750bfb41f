"""The parity rows a node holds: buffers that contributions are added to until complete.

Adding is idempotent: a part that comes twice is counted once. Rows live in this process's memory
(pooled by size); a restarted sidecar starts without any.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from typing_extensions import Buffer

from ckpt.erasure import Codec
from ckpt.errors import CorruptError
from ckpt.isal import crc32c
from ckpt.sidecar.state import SnapshotKey
from ckpt.stripes import Geometry
from ckpt.world import ParityEntry

RowPlace: TypeAlias = tuple[int, int]
"""(stripe, row)."""

_POOL_MAX = 8


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """A parity row under construction; ``entry`` is set once it is sealed.

    ``buffer`` is taken at the first contribution, off the I/O thread.
    """

    key: SnapshotKey
    place: RowPlace
    nbytes: int
    codec: Codec
    missing_bytes: int
    buffer: memoryview | None = None
    seen: set[tuple[int, int]] = field(default_factory=set)
    entry: ParityEntry | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_intact(self) -> bool:
        """Return whether a sealed row's bytes still have their checksum."""
        if self.entry is None:
            return False
        return self.entry.crc32c == (0 if self.buffer is None else crc32c(self.buffer))

    def part(self, at: int, nbytes: int) -> bytes:
        """Return a copy of some bytes of a sealed row."""
        return b"" if self.buffer is None else self.buffer[at : at + nbytes].tobytes()


class Parities:
    """All parity rows of this node. Its table is guarded by a lock of its own."""

    def __init__(self) -> None:
        self._rows: dict[tuple[SnapshotKey, RowPlace], Row] = {}
        self._pool: list[memoryview] = []
        self._lock = threading.Lock()
        self._codec: Codec | None = None

    def prepare(self, key: SnapshotKey, geometry: Geometry, node: str) -> list[Row]:
        """Make the rows ``node`` holds of a committed snapshot; return them."""
        if self._codec is None or (self._codec.k, self._codec.m) != (geometry.k, geometry.m):
            self._codec = Codec(geometry.k, geometry.m)
        made = []
        for place in geometry.rows_of(node):
            filled = (geometry.filled_bytes(place[0], column) for column in range(geometry.k))
            row = Row(
                key=key,
                place=place,
                nbytes=geometry.row_bytes(place[0]),
                codec=self._codec,
                missing_bytes=sum(filled),
            )
            with self._lock:
                self._rows[key, place] = row
            made.append(row)
        return made

    def _take(self, nbytes: int) -> memoryview:
        with self._lock:
            fitting = [buffer for buffer in self._pool if len(buffer) == nbytes]
            if fitting:
                self._pool = [buffer for buffer in self._pool if buffer is not fitting[0]]
        if not fitting:
            return np.zeros(nbytes, dtype=np.uint8).data
        np.frombuffer(fitting[0], dtype=np.uint8).fill(0)
        return fitting[0]

    def get(self, key: SnapshotKey, place: RowPlace) -> Row | None:
        """Return a row, sealed or not."""
        return self._rows.get((key, place))

    def add(self, row: Row, column: int, at: int, data: Buffer) -> ParityEntry | None:
        """Add bytes ``at …`` of a data column; return the entry when that completed the row.

        A part that was added before changes nothing, and returns the entry of a complete row.
        """
        nbytes = memoryview(data).nbytes
        with row.lock:
            if row.entry is None and (column, at) not in row.seen:
                if at < 0 or nbytes == 0 or at + nbytes > row.nbytes:
                    raise CorruptError(f"parity row {row.place}: a part lies outside; not added")
                if row.buffer is None:
                    row.buffer = self._take(row.nbytes)
                into = row.buffer[at : at + nbytes]
                row.codec.encode_update(row.place[1], column, data, into)
                row.seen.add((column, at))
                row.missing_bytes -= nbytes
            return self.seal(row)

    @staticmethod
    def seal(row: Row) -> ParityEntry | None:
        """Return the row's entry if nothing is missing any more."""
        if row.entry is None and row.missing_bytes == 0:
            row.entry = ParityEntry(
                generation=row.key[0],
                step=row.key[1],
                stripe=row.place[0],
                row=row.place[1],
                nbytes=row.nbytes,
                crc32c=0 if row.buffer is None else crc32c(row.buffer),
            )
        return row.entry

    def sealed(self, key: SnapshotKey | None = None) -> list[Row]:
        """Return the complete rows, of one snapshot or of all."""
        with self._lock:
            rows = list(self._rows.values())
        return [row for row in rows if row.entry and key in (None, row.key)]

    def unfinished(self) -> list[Row]:
        """Return the rows that still miss something."""
        with self._lock:
            return [row for row in self._rows.values() if row.entry is None]

    def drop(self, key: SnapshotKey) -> None:
        """Forget a snapshot's rows."""
        with self._lock:
            for each in [each for each in self._rows if each[0] == key]:
                row = self._rows.pop(each)
                if row.entry is None or not row.lock.acquire(blocking=False):
                    continue  # somebody is at it: its buffer is not used again
                buffer, row.buffer = row.buffer, None
                row.lock.release()
                if buffer is not None and len(self._pool) < _POOL_MAX:
                    self._pool.append(buffer)

    def drop_row(self, row: Row) -> None:
        """Forget one row whose bytes went bad."""
        with self._lock:
            self._rows.pop((row.key, row.place), None)

    def nbytes(self) -> int:
        """Return the memory in use, pool included."""
        with self._lock:
            rows = sum(row.nbytes for row in self._rows.values() if row.buffer is not None)
            return rows + sum(len(buffer) for buffer in self._pool)
