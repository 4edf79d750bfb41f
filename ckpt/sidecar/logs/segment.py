"""One file of a log: preallocated, mapped, appended to, recovered up to its last whole record.

``[header, 4096 bytes][frames …][zeros]``. The header holds the log's names as checksummed JSON and,
in two checksummed cells written in turn, the index of the log's first kept record.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import msgspec
from typing_extensions import Buffer

from holdfast.ckpt.errors import CapacityError, CkptError
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.sidecar.logs.frames import FrameBuffer, Frames, framed_bytes
from holdfast.ckpt.types import learn

SEGMENT_SUFFIX = ".log"
UNFINISHED_SUFFIX = ".log-new"
HEADER_BYTES = 4096
_MAGIC = b"HFLOGS1\0"
_LEAD = struct.Struct("<8sII")  # magic, CRC and length of the JSON
_BASE = struct.Struct("<qI")
_CELLS = (HEADER_BYTES - 32, HEADER_BYTES - 16)
_INDEX = struct.Struct("<q")
_CRC_AND_LENGTH = 8


class SegmentHead(msgspec.Struct, frozen=True, kw_only=True):
    """The log of a file, and the index of the file's first record.

    ``birth`` distinguishes logs of one name: the later has the greater number.
    """

    name: str
    node: str
    birth: int
    first: int


class Segment:
    """Records from ``first`` on of a log, in a mapped file."""

    def __init__(self, path: Path, mapping: mmap.mmap, head: SegmentHead) -> None:
        self.path, self.head, self.first = path, head, head.first
        self._mapping = mapping
        self._room = FrameBuffer(memoryview(mapping))
        self._starts = array("I")
        self._used = HEADER_BYTES
        self._unfinished: Path | None = None

    @classmethod
    def create(cls, path: Path, head: SegmentHead, *, size_bytes: int, base: int) -> Segment:
        """Make a file of ``size_bytes``, header included.

        It gets its own name only at `publish`. Raises ``CapacityError`` when shared memory is full.
        """
        text = msgspec.json.encode(head)
        if len(text) > _CELLS[0] - _LEAD.size:
            raise CkptError(f"log name {head.name[:80]!r} is too long; use a shorter one")
        fresh = path.with_suffix(UNFINISHED_SUFFIX)
        segment = cls(path, _allocate(fresh, size_bytes), head)
        segment._unfinished = fresh
        room = segment._room.data
        room[: _LEAD.size] = _LEAD.pack(_MAGIC, crc32c(text), len(text))
        room[_LEAD.size : _LEAD.size + len(text)] = text
        segment.keep_from(base)
        return segment

    def publish(self) -> None:
        """Give a new file its own name: from now on it is part of the log."""
        if self._unfinished is not None:
            self._unfinished.replace(self.path)
            self._unfinished = None

    @classmethod
    def open(cls, path: Path) -> Segment | None:
        """Map a file that an earlier process left; None if its header is not whole.

        A torn record at the end is cut; a damaged one within is skipped and stays missing.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < HEADER_BYTES:
                return None
            mapping = _map(fd)
        finally:
            os.close(fd)
        head = _read_head(mapping)
        if head is None:
            mapping.close()
            return None
        segment = cls(path, mapping, head)
        segment._scan()
        return segment

    @property
    def end(self) -> int:
        """Index behind the last record."""
        return self.first + len(self._starts)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._room.nbytes

    @property
    def room(self) -> int:
        """Bytes left for frames."""
        return self._room.nbytes - self._used

    def bytes_from(self, index: int) -> int:
        """Return the bytes of the frames of records from ``index`` on."""
        return self._used - self._start(index)

    def append(self, records: Sequence[Buffer | None]) -> None:
        """Write records; the caller has made sure that there is room."""
        assert sum(map(framed_bytes, records)) <= self.room
        for record in records:
            index, at = self.end, self._used
            self._used = self._room.write(at, record, index)
            self._starts.append(at)

    def append_frames(self, frames: Frames) -> None:
        """Write frames that continue at this end, in one piece."""
        data = memoryview(frames.data)
        assert frames.first == self.end and data.nbytes <= self.room
        at = self._used
        self._room.data[at : at + data.nbytes] = data
        self._starts.extend([at + start for start in frames.starts])
        self._used = at + data.nbytes

    def read(self, index: int, *, limit_bytes: int) -> tuple[bytes, list[int]]:
        """Return frames of records from ``index`` on, unverified, and their offsets.

        Returns as many as fit into ``limit_bytes``, at least one.
        """
        lo = self._start(index)
        number = index - self.first
        last = bisect_right(self._starts, lo + limit_bytes, lo=number + 1)
        ends_within = last == len(self._starts) and self._used <= lo + limit_bytes
        last = last if ends_within else max(last - 1, number + 1)
        hi = self._start(self.first + last)
        return bytes(self._room.data[lo:hi]), [at - lo for at in self._starts[number:last]]

    def crc(self, index: int) -> int:
        """Return the stored checksum of a record."""
        return self._room.crc(self._start(index))

    def cut(self, index: int) -> None:
        """Remove the records from ``index`` on."""
        at = self._start(index)
        self._room.data[at : self._used] = bytes(self._used - at)
        del self._starts[index - self.first :]
        self._used = at

    def base(self) -> int:
        """Return the index of the log's first kept record as recorded in this file, or 0."""
        cells = [_BASE.unpack_from(self._room.data, at) for at in _CELLS]
        return max((value for value, crc in cells if crc32c(_INDEX.pack(value)) == crc), default=0)

    def keep_from(self, base: int) -> None:
        """Record the index of the log's first kept record; a half-written value does not count."""
        values = [_BASE.unpack_from(self._room.data, at)[0] for at in _CELLS]
        at = _CELLS[values.index(min(values))]
        self._room.data[at : at + _BASE.size] = _BASE.pack(base, crc32c(_INDEX.pack(base)))

    def remove(self) -> None:
        """Remove the file."""
        (self._unfinished or self.path).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._room.data.release()
        self._mapping.close()

    def _start(self, index: int) -> int:
        number = index - self.first
        return self._starts[number] if number < len(self._starts) else self._used

    def _scan(self) -> None:
        """Find the records; overwrite the bytes behind them with zeros, so they never count."""
        at = HEADER_BYTES
        while after := self._room.frame_end(at, self.end) or self._next(at):
            self._starts.append(at)
            at = after
        self._used = at
        rest = self._room.data[at:]
        zeros = bytes(rest.nbytes)
        if rest != zeros:
            rest[:] = zeros

    def _next(self, at: int) -> int:
        """Return the start of the record behind a damaged one at ``at``, 0 if there is none."""
        wanted = self.end + 1
        found = self._mapping.find(_INDEX.pack(wanted), at + HEADER_MIN)
        while found >= 0:
            if self._room.frame_end(found - _CRC_AND_LENGTH, wanted):
                return found - _CRC_AND_LENGTH
            found = self._mapping.find(_INDEX.pack(wanted), found + 1)
        return 0


HEADER_MIN = framed_bytes(None) + _CRC_AND_LENGTH


def _allocate(path: Path, size_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        return _map(fd)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        free = shutil.disk_usage(path.parent).free
        raise CapacityError(
            f"no room for {size_bytes:,} bytes of a log: {path.parent} has {free:,} bytes free; "
            "make room in shared memory, or truncate what has been consumed"
        ) from error
    finally:
        os.close(fd)


def _map(fd: int) -> mmap.mmap:
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if sys.platform == "linux" else 0)
    return mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _read_head(mapping: mmap.mmap) -> SegmentHead | None:
    magic, crc, length = _LEAD.unpack_from(mapping, 0)
    text = mapping[_LEAD.size : _LEAD.size + min(length, HEADER_BYTES)]
    if magic != _MAGIC or crc32c(text) != crc:
        return None
    try:
        return msgspec.json.decode(text, type=SegmentHead)
    except msgspec.DecodeError:
        return None


learn(globals())
