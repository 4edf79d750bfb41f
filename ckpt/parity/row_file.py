"""A parity row's file in the arena: ``[header, 4096 bytes][row]``, kept and used again.

To fill fresh shared memory with pages costs more than to encode into it, so a file that is no
longer needed is relabelled for the next row. Its header holds two records, each with a checksum of
its own. The *label* describes the sealed row and is written last. The *mark* behind it says that
the whole snapshot was protected by then. A file without a label holds no row.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import msgspec

from holdfast.ckpt.errors import CapacityError, CorruptError
from holdfast.ckpt.memory.block import align
from holdfast.ckpt.memory.fixed_files import (
    HEADER_BYTES,
    fixed_name_of,
    make_numbered,
    map_numbered,
)
from holdfast.ckpt.memory.records import ParityEntry
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.pages import is_no_room
from holdfast.ckpt.parity.erasure import CODEC

ROW_SUFFIX = ".row"
_MAGIC, _MARK = b"HFPROW1\0", b"HFPMARK\0"
_MARK_AT = HEADER_BYTES // 2
_GRAIN_BYTES = 1 << 16
# magic, run digest, codec, generation, step, stripe, row, length, capacity, CRC of the row
_LABEL = struct.Struct("<8s16s32sqqqqqqI")
_MARKED = struct.Struct("<8sI")  # magic, CRC of the label that is marked
_CRC = struct.Struct("<I")


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a row in the header of its file."""

    entry: ParityEntry
    protected: bool


class RowFile:
    """A mapped file for a row of at most ``capacity`` bytes, of which ``fixed_bytes`` are fixed.

    A ``borrowed`` file is on a disk; it is never written to or removed.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, *, fixed_bytes: int = 0) -> None:
        self.path, self._mapping = path, mapping
        self.capacity = len(mapping) - HEADER_BYTES
        self.fixed_bytes = fixed_bytes
        self.borrowed = False

    @property
    def fixed_name(self) -> str:
        """The name of the fixed part, "" for a row without one."""
        return fixed_name_of(self.path)

    @property
    def file_bytes(self) -> int:
        """The length of the row's own file."""
        return HEADER_BYTES + self.capacity - self.fixed_bytes

    @classmethod
    def create(cls, path: Path, nbytes: int) -> RowFile:
        """Make a file with all its pages, for ``nbytes`` behind its fixed part.

        Raises ``CapacityError`` when there is no room.
        """
        capacity = align(max(nbytes, 1), _GRAIN_BYTES)
        try:
            mapping, fixed_bytes = make_numbered(path, capacity)
            return cls(path, mapping, fixed_bytes=fixed_bytes)
        except OSError as error:
            if not is_no_room(error):
                raise
            raise no_room_for_row(path.parent, capacity) from error

    @classmethod
    def open(cls, path: str | Path, *, fill: bool = False) -> RowFile:
        """Map an existing file; with ``fill`` its fixed part can be written to.

        Raises ``CorruptError`` for a file that is too short.
        """
        try:
            mapping, fixed_bytes = map_numbered(Path(path), fill=fill)
        except ValueError:
            mapping, fixed_bytes = None, 0
        if mapping is None or len(mapping) - fixed_bytes <= HEADER_BYTES:
            raise CorruptError(f"{path}: too short for a parity row; remove the file")
        return cls(Path(path), mapping, fixed_bytes=fixed_bytes)

    def row(self, nbytes: int) -> memoryview:
        """Return a writable view of the first ``nbytes`` of the row."""
        return memoryview(self._mapping)[HEADER_BYTES : HEADER_BYTES + nbytes]

    def clear(self) -> None:
        """Remove the label, before the row is written to."""
        self._mapping[:HEADER_BYTES] = bytes(HEADER_BYTES)

    def label(self, entry: ParityEntry, *, run: bytes) -> None:
        """Write the label of the row, once it is complete."""
        fields = _LABEL.pack(
            _MAGIC,
            run,
            CODEC.encode().ljust(32, b"\0"),
            entry.generation,
            entry.step,
            entry.stripe,
            entry.row,
            entry.nbytes,
            self.capacity,
            entry.crc32c,
        )
        self._mapping[: _LABEL.size + _CRC.size] = fields + _CRC.pack(crc32c(fields))

    def mark_protected(self) -> None:
        """Mark that all rows of the snapshot are sealed, on all nodes."""
        (label,) = _CRC.unpack_from(self._mapping, _LABEL.size)
        fields = _MARKED.pack(_MARK, label)
        self._mapping[_MARK_AT : _MARK_AT + _MARKED.size + _CRC.size] = fields + _CRC.pack(
            crc32c(fields)
        )

    def read_label(self, *, run: bytes) -> Label | None:
        """Return the label, or None if there is none, a torn one, or one of another run."""
        fields = self._mapping[: _LABEL.size]
        (stored,) = _CRC.unpack_from(self._mapping, _LABEL.size)
        if stored != crc32c(fields):
            return None
        magic, owner, codec, *numbers, nbytes, capacity, checksum = _LABEL.unpack(fields)
        if (magic, owner, capacity) != (_MAGIC, run, self.capacity) or not 0 <= nbytes <= capacity:
            return None
        if codec.rstrip(b"\0") != CODEC.encode():
            return None
        generation, step, stripe, row = numbers
        entry = ParityEntry(
            generation=generation,
            step=step,
            stripe=stripe,
            row=row,
            nbytes=nbytes,
            crc32c=checksum,
        )
        return Label(entry=entry, protected=self._is_marked(stored))

    def _is_marked(self, label: int) -> bool:
        fields = self._mapping[_MARK_AT : _MARK_AT + _MARKED.size]
        (stored,) = _CRC.unpack_from(self._mapping, _MARK_AT + _MARKED.size)
        return stored == crc32c(fields) and _MARKED.unpack(fields) == (_MARK, label)

    def discard(self) -> None:
        """Remove the file; where views of it still exist, its memory goes with the last of them."""
        if not self.borrowed:
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Unmap the file; where views of it still exist, the last of them unmaps it."""
        try:
            self._mapping.close()
        except BufferError:
            return


def no_room_for_row(directory: Path, nbytes: int) -> CapacityError:
    """Return the error for a row of ``nbytes`` that shared memory has no room for."""
    return CapacityError(
        f"no room for a parity row of {nbytes:,} bytes in {directory}: its snapshot stays "
        "unprotected until there is; enlarge shared memory, keep fewer snapshots (keep=1) or "
        "spread the state over more nodes"
    )
