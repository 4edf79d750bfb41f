"""Reading of many regions of one pack in a few calls outside the GIL, checked afterwards.

A restore reads hundreds of regions of a few hundred kilobytes. They are put into one table before
the first byte is read. Then threads read parts of it, one call each: they hardly need the
interpreter, so they do not wait for each other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

import numpy as np

from holdfast.ckpt.format.manifest import ALIGN, CRC_BYTES
from holdfast.ckpt.format.unpack import ChunkReader, Delivery, Pack, Piece
from holdfast.ckpt.native import crc, isal
from holdfast.ckpt.native.checked_read import FIELDS, Pieces
from holdfast.ckpt.store.base import PieceFile, reads_pieces

_SIZE, _TAIL, _REST = (FIELDS.index(name) for name in ("size", "tail", "rest"))

_ROW_BYTES: Final = 16 * crc.BLOCK_BYTES
"""Longer pieces are cut, so that all threads have work until the end."""


class GatheredReads:
    """Regions of chunks of one pack, to be read in `parts`."""

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
            if piece.nbytes <= _ROW_BYTES:
                self._add(reader, piece, to)
                continue
            done = 0
            for part in _cut(piece):
                self._add(reader, part, to + done)
                done += part.last - part.first
        return True

    def _add(self, reader: ChunkReader, piece: Piece, to: int) -> None:
        at, nbytes, first, last, rest, padding, sums, crc32c = piece
        if rest > CRC_BYTES + ALIGN or (rest and padding):
            self._single.append(len(self._rows))
        self._rows.append((at, nbytes, to, first, last, len(self._tails), rest))
        self._pieces.append((reader, piece))
        self._sums += sums
        if rest:
            self._tails += crc32c.to_bytes(CRC_BYTES, "little")
            self._tails += bytes(rest - CRC_BYTES)

    def parts(self, limit_bytes: int) -> Iterator[ReadPart]:
        """Yield all that was added, as parts of about ``limit_bytes`` of the pack each."""
        if not self._rows:
            return
        rows: Pieces = np.array(self._rows, dtype=np.int64)
        tails = memoryview(bytearray(len(self._tails) or 1))
        blocks = [0, *accumulate((-(-rows[:, _SIZE] // crc.BLOCK_BYTES)).tolist())]
        places = [*rows[:, _TAIL].tolist(), len(self._tails)]
        rows[:, _TAIL] += isal.address_of(tails)
        for low, high in _runs((rows[:, _SIZE] + rows[:, _REST]).tolist(), limit_bytes):
            first, last = places[low], places[high]
            yield ReadPart(
                self._file,
                self._pieces[low:high],
                rows[low:high],
                sums=self._sums[4 * blocks[low] : 4 * blocks[high]],
                tails=(tails[first:last], self._tails[first:last]),
                single=[number - low for number in self._single if low <= number < high],
            )


class ReadPart:
    """Some regions of a pack, which fill ``nbytes`` of their arrays.

    ``sums`` are the stored checksums of their blocks. ``tails`` are the memory for the ends of
    chunks, and the bytes that belong there. Those of the ``single`` regions, by number, are another
    way of checking: they have more than a checksum and zeros.
    """

    def __init__(
        self,
        file: PieceFile,
        pieces: Sequence[tuple[ChunkReader, Piece]],
        rows: Pieces,
        *,
        sums: bytearray,
        tails: tuple[memoryview, bytearray],
        single: Sequence[int],
    ) -> None:
        self._file, self._pieces, self._rows = file, pieces, rows
        self._sums, self._single = sums, single
        self._found, self._tails = tails
        self.nbytes = sum(piece.last - piece.first for _, piece in pieces)

    def read(self) -> int:
        """Read the regions into their arrays; return the bytes read.

        Raises ``CorruptError`` naming the tensor whose bytes are damaged or missing.
        """
        rows = self._rows
        sums, done, got = self._file.read_pieces(rows)
        if done < len(rows):
            reader, piece = self._pieces[done]
            reader.require_piece(piece, got)
        if self._single:
            self._check(self._single, sums.tolist())
        same = sums.astype("<u4", copy=False).tobytes() == self._sums
        if not same or self._found.tobytes() != self._tails:
            self._check(range(len(rows)), sums.tolist())
        return int(rows[:, _SIZE].sum() + rows[:, _REST].sum())

    def _check(self, numbers: Iterable[int], sums: list[int]) -> None:
        """Check some regions one by one."""
        counts = [-(-piece.nbytes // crc.BLOCK_BYTES) for _, piece in self._pieces]
        starts = [0, *accumulate(counts)]
        places = [0, *accumulate(piece.rest for _, piece in self._pieces)]
        for number in numbers:
            reader, piece = self._pieces[number]
            tail = slice(places[number], places[number + 1])
            reader.check_piece(piece, sums[starts[number] : starts[number + 1]], self._found[tail])
            self._tails[tail] = self._found[tail]


def _cut(piece: Piece) -> Iterator[Piece]:
    """Cut a piece between blocks; the end of the chunk stays at the last part."""
    for low in range(0, piece.nbytes, _ROW_BYTES):
        size = min(_ROW_BYTES, piece.nbytes - low)
        block = low // crc.BLOCK_BYTES
        yield piece._replace(
            at=piece.at + low,
            nbytes=size,
            first=min(max(piece.first - low, 0), size),
            last=max(min(piece.last - low, size), 0),
            rest=piece.rest if low + size == piece.nbytes else 0,
            sums=piece.sums[4 * block : 4 * (block + -(-size // crc.BLOCK_BYTES))],
        )


def _runs(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield runs of neighbours of at least ``limit`` together, where there are as many."""
    low = total = 0
    for number, size in enumerate(sizes, start=1):
        total += size
        if total >= limit or number == len(sizes):
            yield low, number
            low, total = number, 0
