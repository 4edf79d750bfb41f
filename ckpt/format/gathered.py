"""Reading of many regions of one pack in a single call outside the GIL, checked afterwards.

A restore reads hundreds of regions of a few hundred kilobytes. With a few calls for each, the
threads that read them would wait for each other's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from holdfast.ckpt.format.manifest import ALIGN, CRC_BYTES
from holdfast.ckpt.format.unpack import ChunkReader, Delivery, Pack, Piece
from holdfast.ckpt.native import crc
from holdfast.ckpt.native.checked_read import FIELDS, Pieces
from holdfast.ckpt.store.base import PieceFile, reads_pieces

_SIZE, _TAIL, _REST = (FIELDS.index(name) for name in ("size", "tail", "rest"))


class GatheredReads:
    """Regions of chunks of one pack, which `read` reads in one call."""

    def __init__(self, file: PieceFile) -> None:
        self._file = file
        self._pieces: list[tuple[ChunkReader, Piece]] = []
        self._rows: list[tuple[int, ...]] = []
        self._sums, self._tails = bytearray(), bytearray()
        self._single: list[int] = []

    @classmethod
    def of(cls, pack: Pack) -> GatheredReads | None:
        """Return an empty gathering; None if the pack's file cannot be read in this way."""
        return cls(pack.file) if reads_pieces(pack.file) else None

    def add(self, reader: ChunkReader, deliveries: Sequence[Delivery]) -> bool:
        """Add the regions of a chunk of the pack; return False, with nothing added, if that cannot
        be.

        The caller keeps the arrays alive.
        """
        found: list[tuple[Piece, int]] = []
        for region, target in deliveries:
            piece = reader.piece(region, target)
            if piece is None:
                return False
            found.append((piece, int(target.__array_interface__["data"][0])))
        for piece, to in found:
            row = (piece.at, piece.nbytes, to, piece.first, piece.last, len(self._tails))
            self._rows.append((*row, piece.rest))
            self._pieces.append((reader, piece))
            self._sums += piece.sums
            if piece.rest > CRC_BYTES + ALIGN or (piece.rest and piece.padding):
                self._single.append(len(self._rows) - 1)
            elif piece.rest:
                self._tails += piece.crc32c.to_bytes(CRC_BYTES, "little")
                self._tails += bytes(piece.rest - CRC_BYTES)
        return True

    def read(self) -> int:
        """Read all that was added into its arrays; return the bytes read.

        Raises ``CorruptError`` naming the tensor whose bytes are damaged or missing.
        """
        if not self._rows:
            return 0
        rows: Pieces = np.array(self._rows, dtype=np.int64)
        size = end = len(self._tails)
        for number in self._single:
            rows[number, _TAIL], end = end, end + int(rows[number, _REST])
        tails = np.zeros(max(end, 1), dtype=np.uint8)
        places = rows[:, _TAIL].tolist()
        rows[:, _TAIL] += int(tails.ctypes.data)
        sums, done, got = self._file.read_pieces(rows)
        if done < len(rows):
            reader, piece = self._pieces[done]
            reader.require_piece(piece, got)
        same = sums.astype("<u4", copy=False).tobytes() == self._sums
        if not same or tails[:size].tobytes() != self._tails:
            self._check(range(len(rows)), sums.tolist(), tails.data, places)
        elif self._single:
            self._check(self._single, sums.tolist(), tails.data, places)
        return int(rows[:, _SIZE].sum() + rows[:, _REST].sum())

    def _check(
        self, numbers: Sequence[int], sums: list[int], tails: memoryview, places: Sequence[int]
    ) -> None:
        """Check some pieces one by one."""
        counts = [-(-piece.nbytes // crc.BLOCK_BYTES) for _, piece in self._pieces]
        starts = [0, *accumulate(counts)]
        for number in numbers:
            reader, piece = self._pieces[number]
            at, place = starts[number], places[number]
            found = sums[at : at + counts[number]]
            reader.check_piece(piece, found, tails[place : place + piece.rest])
