"""A parity row while it is built: what is known of its columns, its bytes, what is missing."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from typing_extensions import Buffer

from ckpt import crc
from ckpt.erasure import ErasureCodec
from ckpt.errors import CkptError, CorruptError, FencedError, GivenUpError, PeerError
from ckpt.isal import address_of, crc32c
from ckpt.sidecar.changes import are_disjoint
from ckpt.sidecar.core import THREADS
from ckpt.sidecar.mapped import ColumnReader, MappedColumn
from ckpt.sidecar.messages import Column
from ckpt.sidecar.parity import Row, RowPlace
from ckpt.sidecar.row_file import RowFile
from ckpt.sidecar.state import SnapshotKey
from ckpt.stripes import Geometry
from ckpt.sums import SUM_BYTES, Sums, runs_of
from ckpt.types import Json

RUN_BYTES = 2 * SUM_BYTES
"""What is encoded at a time: all columns of it stay in the cache between check and encoding."""

_PART_RUNS = 16
_COPY_BYTES = 1 << 20


class MovedError(CkptError):
    """A slot was given away while it was read by mapping: get the bytes another way."""


@dataclass(slots=True, kw_only=True, eq=False)
class Build:
    """A row under construction; its mutable parts are guarded by ``lock``."""

    key: SnapshotKey
    place: RowPlace
    geometry: Geometry
    codec: ErasureCodec
    owners: dict[int, str]
    base: Row | None = None
    by_wire: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    columns: dict[int, tuple[Column, Sums]] = field(default_factory=dict)
    file: RowFile | None = None
    view: memoryview | None = None
    missing: set[tuple[int, int]] = field(default_factory=set)
    is_over: bool = False

    @property
    def nbytes(self) -> int:
        """The length of the row."""
        return self.geometry.row_bytes(self.place[0])

    def buffer(self) -> memoryview:
        """Return the bytes of the row; they stay mapped when its file was removed meanwhile."""
        if self.view is None:
            raise FencedError(f"parity row {self.place} was given up")
        return self.view

    def begin_as(self, base: Row) -> bool:
        """Begin as a copy of an earlier row; False where that is gone or damaged."""
        with base.lock:
            if base.buffer is None:
                return base.nbytes == 0 and self._clear_from(0)
            into, start, checksum = self.buffer(), 0, 0
            there, here = address_of(base.buffer), address_of(into)
            while start < base.nbytes:
                size = min(_COPY_BYTES, base.nbytes - start)
                checksum = crc32c(base.buffer[start : start + size], checksum)
                if (room := min(size, self.nbytes - start)) > 0:
                    ctypes.memmove(here + start, there + start, room)
                start += size
            self._clear_from(base.nbytes)
            return checksum == base.entry.crc32c

    def _clear_from(self, at: int) -> bool:
        np.frombuffer(self.buffer(), dtype=np.uint8)[at:] = 0
        return True

    def begin_empty(self) -> None:
        """Begin with zeros."""
        self._clear_from(0)


def parse_column(
    build: Build, column: int, answer: Json, frames: Sequence[memoryview]
) -> tuple[Column, Sums]:
    """Return an owner's answer about a column, and the sums of its spans.

    Raises ``PeerError`` for one that does not describe this very column.
    """
    try:
        found = msgspec.convert(answer, Column)
    except msgspec.ValidationError as error:
        raise _malformed(str(error)) from error
    stripe, geometry = build.place[0], build.geometry
    spans = geometry.spans(stripe, column, 0, geometry.filled_bytes(stripe, column))
    said = [(each.entry.rank, each.at, each.nbytes, each.into) for each in found.spans]
    if said != [(each.rank, each.at, each.nbytes, each.into) for each in spans]:
        raise _malformed(f"it names the spans {said} of column {column}, stripe {stripe}")
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
    return PeerError(f"malformed answer about a column: {why}", kind="CorruptError")


class Encoding:
    """One pass over mapped columns: ``parts`` of the row side by side, each in runs."""

    def __init__(self, build: Build, columns: dict[int, MappedColumn]) -> None:
        self._build, self._columns = build, columns
        self._lock = threading.Lock()
        self._checksums: dict[int, int] = {}
        size = max(-(-build.nbytes // THREADS), _PART_RUNS * RUN_BYTES)
        size = -(-size // RUN_BYTES) * RUN_BYTES
        self.parts = [(lo, min(lo + size, build.nbytes)) for lo in range(0, build.nbytes, size)]

    def encode(self, lo: int, hi: int) -> tuple[int, int | None]:
        """Encode a part; return the bytes read and, from the last part to end, the row's CRC.

        Raises ``MovedError`` when a slot was given away meanwhile, ``GivenUpError`` naming the
        node and rank whose bytes are not what was sealed.
        """
        build, checksum, read = self._build, 0, 0
        row, zeros = build.buffer(), bytes(RUN_BYTES)
        readers = self._readers()
        for at in range(lo, hi, RUN_BYTES):
            run = row[at : min(at + RUN_BYTES, hi)]
            inputs: list[Buffer] = [zeros[: len(run)]] * build.codec.k
            for column, reader in readers.items():
                inputs[column], nbytes = _whole(reader, at, len(run))
                read += nbytes
            build.codec.encode(inputs, {build.place[1]: run})
            checksum = crc32c(run, checksum)
        if not all(each.is_current() for each in self._columns.values()):
            raise MovedError(f"a column of step {build.key[1]} was released while it was read")
        return read, self._note(lo, checksum)

    def _readers(self) -> dict[int, ColumnReader]:
        try:
            return {column: each.reader() for column, each in self._columns.items()}
        except ValueError as error:  # unmapped, for its file was removed
            raise MovedError(f"a column of step {self._build.key[1]} was removed") from error

    def _note(self, lo: int, checksum: int) -> int | None:
        with self._lock:
            self._checksums[lo] = checksum
            if len(self._checksums) < len(self.parts):
                return None
        total = 0
        for first, last in self.parts:
            total = crc.combine(total, self._checksums[first], last - first)
        return total


def _whole(reader: ColumnReader, at: int, nbytes: int) -> tuple[Buffer, int]:
    """Return ``nbytes`` of a column as one buffer, and how many of them are not gaps."""
    try:
        parts = list(reader.parts(at, at + nbytes))
    except CorruptError as error:
        raise GivenUpError(str(error)) from error
    if len(parts) == 1 and len(parts[0][1]) == nbytes:
        return parts[0][1], nbytes
    data = np.zeros(nbytes, dtype=np.uint8)
    for start, part in parts:
        data[start - at : start - at + len(part)] = np.frombuffer(part, dtype=np.uint8)
    return data.data, sum(len(part) for _, part in parts)
