"""A text that a sidecar leaves to its successor, replaced as a whole even where memory is full."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from holdfast.ckpt.memory.block import align
from holdfast.ckpt.native.isal import crc32c

RESERVE_BYTES = 1 << 14
_FIELDS = struct.Struct("<QQ")  # number of the text, its length in bytes
_CRC = struct.Struct("<I")
_HEADER_BYTES = _CRC.size + _FIELDS.size
_SUFFIXES = ("0", "1")


class Note:
    """The text ``name`` in an arena's directory.

    Two files are written in turn, each text behind its number and checksum. So a process that dies
    while writing leaves the text before. Room for both is allocated with the first text and kept: a
    full file system refuses only a text that has outgrown it.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._paths = [directory / f"{name}.{suffix}" for suffix in _SUFFIXES]
        self._number = max((number for number, _ in self._texts()), default=0)

    def read(self) -> bytes | None:
        """Return the newest whole text, None if there is none."""
        found = max(self._texts(), key=lambda each: each[0], default=None)
        return found[1] if found else None

    def write(self, text: bytes) -> None:
        """Replace the text. Raises ``OSError`` if there is no room; the old text stays."""
        fields = _FIELDS.pack(self._number + 1, len(text)) + text
        data = _CRC.pack(crc32c(fields)) + fields
        for path in self._paths:
            _reserve(path, len(data))
        fd = os.open(self._paths[(self._number + 1) % len(self._paths)], os.O_WRONLY)
        try:
            os.pwrite(fd, data, 0)
        finally:
            os.close(fd)
        self._number += 1

    def _texts(self) -> list[tuple[int, bytes]]:
        found = []
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError, struct.error):
                data = path.read_bytes()
                (stored,) = _CRC.unpack_from(data)
                number, length = _FIELDS.unpack_from(data, _CRC.size)
                if stored == crc32c(data[_CRC.size : _HEADER_BYTES + length]):
                    found.append((number, data[_HEADER_BYTES : _HEADER_BYTES + length]))
        return found


def _reserve(path: Path, nbytes: int) -> None:
    """Allocate ``nbytes`` and as much again for a file, unless it has ``nbytes`` already."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size < nbytes:
            os.posix_fallocate(fd, 0, align(2 * nbytes, RESERVE_BYTES))
    finally:
        os.close(fd)
