"""A parity row made of nothing but columns that arrive over the wire, in any order.

The row is passed over as rarely as possible: a cell of it is cleared when its first column arrives
and checksummed when its last one does, piece by piece, each piece in the cache meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import numpy as np

from holdfast.ckpt.native import crc
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.parity.codec import ErasureCodec

_PIECE_BYTES: Final = 256 << 10


class FreshRow:
    """The bytes of ``row`` from ``start`` on, whatever they were before. Guarded by the caller.

    ``number`` is that of the row in its code. ``parts`` names each part that will be added once, by
    its column and its first byte; a part begins with a cell of ``cell_bytes``, and ends with it or
    earlier. Raises ``ValueError`` for one that does not.
    """

    def __init__(
        self,
        row: memoryview,
        *,
        start: int,
        cell_bytes: int,
        codec: ErasureCodec,
        number: int,
        parts: Iterable[tuple[int, int]],
    ) -> None:
        self._row, self._start, self._cell_bytes = row, start, cell_bytes
        self._codec, self._number = codec, number
        self._waiting = Counter(lo for _, lo in parts)
        self._begun: set[int] = set()
        self._checksums: dict[int, int] = {}
        cells = range(start, len(row), cell_bytes)
        if not self._waiting.keys() <= {*cells}:
            raise ValueError(f"parts begin at {sorted(self._waiting)}, cells at {cells}")
        for lo in cells:
            if not self._waiting[lo]:
                self._pass_over(lo, None, b"")

    def add(self, column: int, lo: int, part: memoryview) -> None:
        """Add a part of a column, which begins at byte ``lo`` of the row."""
        if lo + len(part) > self._end(lo):
            raise ValueError(f"a part of {len(part)} bytes at {lo} is longer than its cell")
        self._waiting[lo] -= 1
        self._pass_over(lo, column, part)
        self._begun.add(lo)

    def _pass_over(self, lo: int, column: int | None, part: memoryview | bytes) -> None:
        """Add ``part`` to a cell; clear the cell before, checksum it behind, where it is time."""
        hi, is_first, is_last = self._end(lo), lo not in self._begun, not self._waiting[lo]
        checksum = 0
        for at in range(lo, hi, _PIECE_BYTES):
            piece = self._row[at : min(at + _PIECE_BYTES, hi)]
            if is_first:
                np.frombuffer(piece, dtype=np.uint8)[:] = 0
            some = part[at - lo : at - lo + len(piece)]
            if column is not None and some:
                self._codec.encode_update(self._number, column, some, piece[: len(some)])
            if is_last:
                checksum = crc32c(piece, checksum)
        if is_last:
            self._checksums[lo] = checksum

    def _end(self, lo: int) -> int:
        return min(lo + self._cell_bytes, len(self._row))

    def checksum(self) -> int:
        """Return the CRC32C of the bytes from ``start`` on, once every part was added."""
        found = 0
        for lo in range(self._start, len(self._row), self._cell_bytes):
            found = crc.combine(found, self._checksums[lo], self._end(lo) - lo)
        return found
