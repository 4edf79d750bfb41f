"""A parity row while it is built: its described columns, its bytes, and the missing ranges."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from holdfast.ckpt.errors import CkptError, CorruptError, FencedError, GivenUpError, PeerError
from holdfast.ckpt.memory.block import align
from holdfast.ckpt.native import crc
from holdfast.ckpt.native.isal import address_of, crc32c
from holdfast.ckpt.native.sums import SUM_BYTES, CheckedBlock, Sums, runs_of, sums_of
from holdfast.ckpt.parity.codec import ErasureCodec
from holdfast.ckpt.parity.row_file import RowFile
from holdfast.ckpt.parity.stripes import Geometry
from holdfast.ckpt.sidecar.core.book import SnapshotKey
from holdfast.ckpt.sidecar.core.core import THREADS
from holdfast.ckpt.sidecar.core.messages import Column
from holdfast.ckpt.sidecar.parity.changes import Range, are_disjoint
from holdfast.ckpt.sidecar.parity.fresh_row import FreshRow
from holdfast.ckpt.sidecar.parity.mapped import ColumnReader, MappedColumn
from holdfast.ckpt.sidecar.parity.rows import ParityRow, RowPlace, RowSize
from holdfast.ckpt.types import Json

WINDOW_BYTES = 32 * SUM_BYTES
"""The bytes given to the codec at a time; it processes them in pieces that stay in the cache."""

_COPY_BYTES = 1 << 20
_CHECKED_RUNS = 64
"""At each step one of so many runs of a fixed part is checked: it has to last for long."""


class MovedError(CkptError):
    """A slot was reused while it was read by mapping: get the bytes another way."""


@dataclass(slots=True, kw_only=True, eq=False)
class Build:
    """A row under construction; its mutable parts are guarded by ``lock``.

    ``fixed`` are the sums of the row's fixed part, where that is complete already.
    """

    key: SnapshotKey
    place: RowPlace
    geometry: Geometry
    codec: ErasureCodec
    size: RowSize
    fixed: Sums | None
    owners: dict[int, str]
    base: ParityRow | None = None
    by_wire: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    columns: dict[int, tuple[Column, Sums]] = field(default_factory=dict)
    file: RowFile | None = None
    view: memoryview | None = None
    missing: set[tuple[int, int]] = field(default_factory=set)
    fresh: FreshRow | None = None
    is_over: bool = False

    @property
    def nbytes(self) -> int:
        """The length of the row."""
        return self.size.nbytes

    @property
    def start(self) -> int:
        """The first byte that has to be built."""
        return 0 if self.fixed is None else self.size.fixed_bytes

    @property
    def fills_fixed(self) -> bool:
        """True for the row that writes the bytes of its fixed part."""
        return bool(self.size.fixed) and self.fixed is None

    def checksum(self, rest: int) -> int:
        """Return the CRC32C of the row from that of the bytes from `start` on."""
        if self.fixed is None:
            return rest
        before = crc.of_blocks(self.fixed.tolist(), self.start)
        return crc.combine(before, rest, self.nbytes - self.start)

    def check_fixed(self) -> None:
        """Check a part of the fixed part, another one at each step. Raises ``CorruptError``."""
        if self.fixed is None:
            return
        part = CheckedBlock(self.buffer()[: self.start], self.fixed, origin="parity of fixed parts")
        for run in range(self.key[1] % _CHECKED_RUNS, len(self.fixed), _CHECKED_RUNS):
            part.take(run * SUM_BYTES, min(SUM_BYTES, self.start - run * SUM_BYTES))

    def filled_sums(self) -> Sums:
        """Return the sums of the fixed part that this row has written."""
        return sums_of(self.buffer()[: self.size.fixed_bytes])

    def buffer(self) -> memoryview:
        """Return the bytes of the row; they stay mapped even if its file was removed meanwhile."""
        if self.view is None:
            raise FencedError(f"parity row {self.place} was given up")
        return self.view

    def begin_as(self, base: ParityRow) -> bool:
        """Begin as a copy of an earlier row; return False if that is gone or damaged."""
        with base.lock:
            if base.buffer is None:
                return base.nbytes == 0 and self._clear_from(self.start)
            into, start = self.buffer(), min(self.start, base.nbytes)
            if self.fixed is not None and base.fixed_name == self.size.fixed:
                checksum = crc.of_blocks(self.fixed.tolist(), start)
            else:
                checksum = crc32c(base.buffer[:start])
            there, here = address_of(base.buffer), address_of(into)
            while start < base.nbytes:
                size = min(_COPY_BYTES, base.nbytes - start)
                checksum = crc32c(base.buffer[start : start + size], checksum)
                if (room := min(size, self.nbytes - start)) > 0:
                    ctypes.memmove(here + start, there + start, room)
                start += size
            self._clear_from(max(base.nbytes, self.start))
            return checksum == base.entry.crc32c

    def _clear_from(self, at: int) -> bool:
        np.frombuffer(self.buffer(), dtype=np.uint8)[at:] = 0
        return True

    def begin_fresh(self, cell_bytes: int) -> None:
        """Begin with nothing: the ``missing`` parts, each in its cell, are all there is."""
        self.fresh = FreshRow(
            self.buffer(),
            start=self.start,
            cell_bytes=cell_bytes,
            codec=self.codec,
            number=self.place[1],
            parts=self.missing,
        )

    def add(self, column: int, batch: Sequence[Range], parts: Sequence[memoryview]) -> None:
        """Add some ranges of a column, the very first time; the caller holds the lock."""
        if self.fresh is not None:
            self.fresh.add(column, batch[0][0], parts[0])
            return
        row = self.buffer()
        for (lo, hi), part in zip(batch, parts, strict=True):
            self.codec.encode_update(self.place[1], column, part, row[lo:hi])

    def made_checksum(self) -> int:
        """Return the CRC32C of a row to which all parts were added."""
        if self.fresh is not None:
            return self.checksum(self.fresh.checksum())
        return self.checksum(crc32c(self.buffer()[self.start :]))


def parse_column(
    build: Build, column: int, answer: Json, frames: Sequence[memoryview]
) -> tuple[Column, Sums]:
    """Return an owner's answer about a column, and the sums of its spans.

    Raises ``PeerError`` for an answer that does not describe this very column.
    """
    try:
        found = msgspec.convert(answer, Column)
    except msgspec.ValidationError as error:
        raise _malformed(str(error)) from error
    spans = build.geometry.spans_from(build.place[0], column, build.start)
    named = [(each.entry.rank, each.at, each.nbytes, each.into) for each in found.spans]
    if named != [(each.rank, each.at, each.nbytes, each.into) for each in spans]:
        raise _malformed(f"it names the spans {named} of column {column}, stripe {build.place[0]}")
    if any((each.entry.generation, each.entry.step) != build.key for each in found.spans):
        raise _malformed("it is of another step")
    runs = [runs_of(each.at, each.nbytes) for each in found.spans]
    if any((each.first, each.count) != run for each, run in zip(found.spans, runs, strict=True)):
        raise _malformed("it names the wrong sums")
    sums = 4 * sum(count for _, count in runs)
    if len(frames) != 1 or frames[0].nbytes != sums:
        raise _malformed(f"it came with {[f.nbytes for f in frames]} bytes of sums, not {sums}")
    changed = found.changed or ()
    if not are_disjoint(changed) or any(hi > build.nbytes for _, hi in changed):
        raise _malformed(f"it says that {changed[:4]} … changed in {build.nbytes:,} bytes")
    return found, np.frombuffer(frames[0], dtype="<u4").astype(np.uint32)


def _malformed(why: str) -> PeerError:
    return PeerError(f"malformed answer about a column: {why}", peer_code=CorruptError.code)


def cut_row(start: int, nbytes: int) -> list[tuple[int, int]]:
    """Cut a row, from ``start`` on, into the parts that threads make in parallel."""
    size = align(max(-(-(nbytes - start) // THREADS), WINDOW_BYTES), WINDOW_BYTES)
    return [(lo, min(lo + size, nbytes)) for lo in range(start, nbytes, size)]


class Encoding:
    """One pass over mapped columns: ``parts`` of the row in parallel, each in windows."""

    def __init__(self, build: Build, columns: dict[int, MappedColumn]) -> None:
        self._build, self.columns = build, columns
        self._lock = threading.Lock()
        self._checksums: dict[int, int] = {}
        self.parts = cut_row(build.start, build.nbytes)

    def encode(self, lo: int, hi: int) -> tuple[int, int | None]:
        """Encode a part; return the bytes read and, from the last part to end, the row's CRC.

        Raises ``MovedError`` when a slot was reused meanwhile, ``GivenUpError`` naming the node and
        rank whose bytes differ from the sealed ones.
        """
        build, checksum, read = self._build, 0, 0
        row, readers, number = build.buffer(), self._readers(), build.place[1]
        for at in range(lo, hi, WINDOW_BYTES):
            window = row[at : min(at + WINDOW_BYTES, hi)]
            columns, unchecked = _window(readers, at, len(window))
            inputs = [columns.get(column, b"") for column in range(build.codec.k)]
            read += sum(map(len, columns.values()))
            try:
                sums = build.codec.encode(inputs, {number: window}, before=_checking(unchecked, at))
            except CorruptError as error:
                raise GivenUpError(str(error)) from error
            checksum = crc.combine(checksum, sums[number], len(window))
        if not all(each.is_current() for each in self.columns.values()):
            raise MovedError(f"a column of step {build.key[1]} was released while it was read")
        return read, self._note(lo, checksum)

    def _readers(self) -> dict[int, ColumnReader]:
        try:
            return {column: each.reader() for column, each in self.columns.items()}
        except ValueError as error:  # unmapped, because its file was removed
            raise MovedError(f"a column of step {self._build.key[1]} was removed") from error

    def _note(self, lo: int, checksum: int) -> int | None:
        with self._lock:
            self._checksums[lo] = checksum
            if len(self._checksums) < len(self.parts):
                return None
        total = 0
        for first, last in self.parts:
            total = crc.combine(total, self._checksums[first], last - first)
        return self._build.checksum(total)


def _window(
    readers: Mapping[int, ColumnReader], at: int, nbytes: int
) -> tuple[dict[int, memoryview], list[ColumnReader]]:
    """Return ``nbytes`` of each column from ``at``, and the readers to check during use.

    Zeros at the end may be left out. Raises ``GivenUpError``.
    """
    columns: dict[int, memoryview] = {}
    unchecked = []
    for column, reader in readers.items():
        view = reader.adjacent(at, at + nbytes)
        if view is None:
            view = _gathered(reader, at, nbytes)
        else:
            unchecked.append(reader)
        columns[column] = view
    return columns, unchecked


def _checking(readers: Sequence[ColumnReader], at: int) -> Callable[[int, int], None]:
    def check(lo: int, hi: int) -> None:
        for reader in readers:
            reader.check(at + lo, at + hi)

    return check


def _gathered(reader: ColumnReader, at: int, nbytes: int) -> memoryview:
    """Return a copy of a range of a column, with zeros in the gaps."""
    data = np.zeros(nbytes, dtype=np.uint8)
    try:
        for start, part in reader.parts(at, at + nbytes):
            into = data[start - at : start - at + len(part)]
            np.copyto(into, np.frombuffer(part, dtype=np.uint8))
    except CorruptError as error:
        raise GivenUpError(str(error)) from error
    return data.data
