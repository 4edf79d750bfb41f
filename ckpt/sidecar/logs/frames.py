"""Frames of log records, in files and messages: length, index and checksum of each.

A frame is ``[crc32c u32][length u32][index i64][record]``, little-endian; the checksum covers all
that follows it. Frames carry no address, so runs of them are sent, stored and read without parsing,
and a flipped byte is found anywhere in them. A *hole* stands for a record that was damaged in its
file: it keeps the numbering of the following ones.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import Buffer

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.native.isal import address_of, crc32c_at

FRAME = struct.Struct("<IIq")
_CRC = struct.Struct("<I")
_REST = struct.Struct("<Iq")
_HOLE = 0xFFFFFFFF


def framed_bytes(record: Buffer | None) -> int:
    """Return the size of a record's frame; None is a hole."""
    return FRAME.size + (memoryview(record).nbytes if record is not None else 0)


class FrameBuffer:
    """Writable memory for frames, with its address."""

    __slots__ = ("_address", "data", "nbytes")

    def __init__(self, data: memoryview) -> None:
        self.data, self.nbytes = data, data.nbytes
        self._address = address_of(data) if data.nbytes else 0

    def write(self, at: int, record: Buffer | None, index: int) -> int:
        """Write a frame at ``at``; return its end. Its checksum is written last."""
        view = memoryview(record).cast("B") if record is not None else memoryview(b"")
        length = _HOLE if record is None else view.nbytes
        end = at + FRAME.size + view.nbytes
        _REST.pack_into(self.data, at + _CRC.size, length, index)
        self.data[at + FRAME.size : end] = view
        crc = crc32c_at(self._address + at + _CRC.size, end - at - _CRC.size)
        _CRC.pack_into(self.data, at, crc)
        return end

    def frame_end(self, at: int, index: int) -> int:
        """Return the end of the frame of record ``index`` at ``at``, 0 if it is not sound."""
        if at + FRAME.size > self.nbytes:
            return 0
        crc, length, found = FRAME.unpack_from(self.data, at)
        end = at + FRAME.size + (0 if length == _HOLE else length)
        if found != index or end > self.nbytes:
            return 0
        return end if crc32c_at(self._address + at + _CRC.size, end - at - _CRC.size) == crc else 0

    def crc(self, at: int) -> int:
        """Return the stored checksum of the frame at ``at``."""
        return int(_CRC.unpack_from(self.data, at)[0])


def is_hole(data: Buffer, at: int) -> bool:
    """Return whether a frame stands for a record that was damaged."""
    return bool(FRAME.unpack_from(data, at)[1] == _HOLE)


@dataclass(frozen=True, slots=True)
class Frames:
    """A run of sound frames of records from ``first`` on; ``starts`` are their offsets."""

    first: int
    data: bytes | memoryview
    starts: Sequence[int]

    @property
    def end(self) -> int:
        """Index behind the last record."""
        return self.first + len(self.starts)

    def spans(self) -> list[tuple[int, int]]:
        """Return the begin and end of each frame."""
        return _spans(self.starts, memoryview(self.data).nbytes)

    def crc(self, index: int) -> int:
        """Return the checksum of a record's frame."""
        return int(_CRC.unpack_from(self.data, self.starts[index - self.first])[0])

    def is_hole(self, index: int) -> bool:
        """Return whether a record is missing."""
        return is_hole(self.data, self.starts[index - self.first])

    def since(self, index: int) -> Frames:
        """Return the frames of records from ``index`` on."""
        count = min(max(index - self.first, 0), len(self.starts))
        if count == 0:
            return self
        at = self.starts[count] if count < len(self.starts) else memoryview(self.data).nbytes
        rest = [start - at for start in self.starts[count:]]
        return Frames(self.first + count, memoryview(self.data)[at:], rest)

    def records(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield (index, record); None for a record that is missing."""
        for index, (start, end) in enumerate(self.spans(), self.first):
            whole = not is_hole(self.data, start)
            yield index, bytes(self.data[start + FRAME.size : end]) if whole else None


def pack(records: Sequence[Buffer | None], first: int) -> Frames:
    """Return ``records`` framed."""
    room = FrameBuffer(memoryview(bytearray(sum(map(framed_bytes, records)))))
    starts, at = [], 0
    for index, record in enumerate(records, first):
        starts.append(at)
        at = room.write(at, record, index)
    return Frames(first, room.data, starts)


def parse(data: memoryview, first: int, *, count: int, origin: str) -> Frames:
    """Parse ``count`` frames that were received.

    Raises ``CorruptError`` unless they are exactly those, every checksum right.
    """
    room, starts, at = FrameBuffer(data), array("Q"), 0
    for index in range(first, first + count):
        starts.append(at)
        at = room.frame_end(at, index)
        if at == 0:
            raise CorruptError(f"{origin}: record {index} of a log fails its checksum; send again")
    if at != data.nbytes:
        raise CorruptError(
            f"{origin}: {data.nbytes:,} bytes came for {count} records of {at:,}; send again"
        )
    return Frames(first, data, starts)


def sound(data: bytes, first: int, starts: Sequence[int]) -> Frames:
    """Return frames copied from a log, with a hole in the place of each damaged one."""
    room = FrameBuffer(memoryview(data))
    spans = _spans(starts, len(data))
    bad = {
        index
        for index, (start, end) in enumerate(spans)
        if room.frame_end(start, first + index) != end
    }
    if not bad:
        return Frames(first, data, starts)
    return pack(
        [
            None if index in bad or is_hole(data, start) else data[start + FRAME.size : end]
            for index, (start, end) in enumerate(spans)
        ],
        first,
    )


def _spans(starts: Sequence[int], nbytes: int) -> list[tuple[int, int]]:
    return list(zip(starts, [*starts[1:], nbytes], strict=False))
