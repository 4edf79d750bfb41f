"""Verified reading of the chunks of packs, by ranges, directly into the destination arrays.

The range is verified by blocks of `holdfast.ckpt.native.crc.BLOCK_BYTES`, read in runs small enough
that their checksum is computed while they are in the cache. Padded chunks, compressed chunks, and
old chunks without block checksums are read whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format import codecs
from holdfast.ckpt.format.manifest import (
    ALIGN,
    CRC_BYTES,
    PackedChunk,
    PackedTensor,
    PackIndex,
    padded_bytes,
    stored_bytes,
)
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.native import crc, isal
from holdfast.ckpt.store.base import Readable, is_summing

Array: TypeAlias = npt.NDArray[Any]

Delivery: TypeAlias = tuple[Box, Array]
"""A region of a chunk and its destination: an array of that shape, of the elements' width."""

_CALL_BYTES: Final = 64 * crc.BLOCK_BYTES
"""The bytes read in one call of a file that checksums them in pieces of its own."""

_SLAB_BYTES: Final = 4 << 20
"""The bytes read at a time of chunk rows from which columns are taken."""


class Pack:
    """An open pack; ``ends``, where known, are the ends of its chunks with the zeros behind."""

    def __init__(self, file: Readable, *, origin: str, ends: dict[int, int]) -> None:
        self.file, self.origin, self.ends = file, origin, ends

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def ends_of(index: PackIndex) -> dict[int, int]:
    """Return the end of each chunk of a writer's own pack, up to the next one, by its start."""
    starts = sorted(
        c.at for tensor in index.tensors.values() for c in tensor.chunks if c.base is None
    )
    return dict(pairwise([*starts, index.pack_bytes]))


def aligned_ends(index: PackIndex) -> dict[int, int]:
    """Return `ends_of` some chunks of a pack in which all chunks start at multiples of `ALIGN`."""
    return {
        c.at: -(-(c.at + stored_bytes(c, tensor) + CRC_BYTES) // ALIGN) * ALIGN
        for tensor in index.tensors.values()
        for c in tensor.chunks
        if c.base is None
    }


class Piece(NamedTuple):
    """Blocks of a chunk: ``nbytes`` bytes at ``at`` in the pack, of which ``first … last`` are
    wanted.

    ``rest`` bytes follow that end the chunk: ``padding`` of its cell, then its checksum and zeros.
    ``sums`` are the checksums of the blocks as they are stored, ``crc32c`` is that of the chunk.
    """

    at: int
    nbytes: int
    first: int
    last: int
    rest: int
    padding: int
    sums: bytes
    crc32c: int


class ChunkReader:
    """Reads one chunk of a pack; not shared between threads."""

    def __init__(self, pack: Pack, fqn: str, tensor: PackedTensor, chunk: PackedChunk) -> None:
        self._pack, self._fqn, self._tensor, self._chunk = pack, fqn, tensor, chunk
        self.nbytes = chunk.nbytes

    @property
    def _itemsize(self) -> int:
        return self._chunk.nbytes // self._chunk.box.size

    @property
    def _stored(self) -> int:
        return stored_bytes(self._chunk, self._tensor)

    # -- whole -----------------------------------------------------------------------------------

    def read(self, into: memoryview) -> int:
        """Read all elements of the box into ``into``; return the bytes read."""
        if self._in_one_run():
            return self._runs(0, self._chunk.nbytes, into)
        return self._indirect(into)

    def deliver(self, deliveries: Sequence[Delivery]) -> int:
        """Read regions into their destinations; return the bytes read from the pack."""
        if self._by_blocks():
            return sum(self._deliver(region, target) for region, target in deliveries)
        whole = sum(array.size for _, array in deliveries) == self._chunk.box.size
        if whole and len(deliveries) == 1 and deliveries[0][1].flags.c_contiguous:
            return self.read(_bytes_of(deliveries[0][1]))
        box, read = self._apart()
        for region, target in deliveries:
            np.copyto(target.view(self._kind), box[region.slices])
        return read

    def _apart(self) -> tuple[Array, int]:
        """Return the box, read into a buffer of its own, and the bytes read."""
        if not self._in_one_run():
            return self._unpacked(None)
        room = memoryview(bytearray(self._chunk.nbytes))
        read = self.read(room)
        return np.frombuffer(room, self._kind).reshape(self._chunk.box.shape), read

    @property
    def _kind(self) -> np.dtype[Any]:
        return np.dtype((np.void, self._itemsize))

    def _in_one_run(self) -> bool:
        """Say whether the box's bytes lie in the pack unchanged and contiguous."""
        if self._chunk.stored is not None:
            return False
        cell = self._tensor.cell
        return not self._chunk.padded or cell is None or self._chunk.box.shape[1:] == cell[1:]

    def _by_blocks(self) -> bool:
        small = self._chunk.nbytes <= crc.BLOCK_BYTES
        return self._in_one_run() and (bool(self._chunk.blocks) or small)

    def _indirect(self, into: memoryview) -> int:
        """Read a chunk that is compressed, or padded inside its rows."""
        box, read = self._unpacked(None if self._chunk.padded else into)
        if self._chunk.padded:
            np.frombuffer(into, self._kind).reshape(box.shape)[...] = box
        return read

    def _unpacked(self, into: memoryview | None) -> tuple[Array, int]:
        """Return the box of such a chunk, in ``into`` if that is given, and the bytes read.

        Memory for a decompressed size is allocated only after the data's own header states that
        size.
        """
        extent = self._extent()
        data = memoryview(bytearray(extent))
        self._fill([data], 0, extent)
        body = data[: self._stored]
        self._check_tail(isal.crc32c(body), data[self._stored :])
        if self._tensor.codec is not None:
            nbytes = padded_bytes(self._chunk, self._tensor)
            try:
                body = codecs.decode(self._tensor.codec, body, nbytes=nbytes, into=into)
            except CorruptError as error:
                raise self._damage(str(error)) from error
        shape = self._chunk.box.shape
        if not self._chunk.padded:
            self._expect(isal.crc32c(body), self._chunk.crc32c)
            return np.frombuffer(body, self._kind).reshape(shape), extent
        cell = np.frombuffer(body, self._kind).reshape(self._tensor.cell or ())
        box = np.ascontiguousarray(cell[tuple(slice(n) for n in shape)])
        self._expect(isal.crc32c(_bytes_of(box)), self._chunk.crc32c)
        return box.reshape(shape), extent

    # -- many chunks in one call -------------------------------------------------------------------

    @property
    def pack(self) -> Pack:
        """The pack that holds the chunk."""
        return self._pack

    def piece(self, region: Box, target: Array) -> Piece | None:
        """Return the bytes to read for a region; None if they are not one run of checked blocks."""
        chunk, flags, nbytes = self._chunk, target.flags, target.nbytes
        if not (self._by_blocks() and flags.c_contiguous and flags.writeable):
            return None
        whole, crc32c = chunk.nbytes, chunk.crc32c
        if nbytes == whole:  # the arguments are by position: this is done for every chunk
            rest, padding = self._extent() - whole, self._stored - whole
            sums = chunk.blocks or crc32c.to_bytes(4, "little")
            return Piece(chunk.at, whole, 0, whole, rest, padding, sums, crc32c)
        first, end = self._span(region)
        if end - first != nbytes:
            return None
        block = crc.BLOCK_BYTES
        number, stop = first // block, -(-end // block)
        low, high = number * block, min(stop * block, whole)
        sums = chunk.blocks[number * 4 : stop * 4] or crc32c.to_bytes(4, "little")
        return Piece(chunk.at + low, high - low, first - low, end - low, 0, 0, sums, crc32c)

    def require_piece(self, piece: Piece, got: int) -> None:
        """Raise ``CorruptError`` unless ``got`` is all of a piece's bytes."""
        self._require(got, piece.at - self._chunk.at, piece.nbytes + piece.rest)

    def check_piece(self, piece: Piece, sums: Sequence[int], tail: memoryview) -> None:
        """Raise ``CorruptError`` if what was read of a piece is damaged."""
        low = piece.at - self._chunk.at
        for number, (found, wanted) in enumerate(
            zip(sums, crc.from_bytes(piece.sums), strict=True)
        ):
            self._expect(found, wanted, at=low + number * crc.BLOCK_BYTES)
        if tail:
            self._finish(self._chunk.crc32c, tail)

    # -- many small chunks -------------------------------------------------------------------------

    def small_and_whole(self, deliveries: Sequence[Delivery]) -> bool:
        """Say whether this is one block, read as a whole into one contiguous array."""
        return (
            self._chunk.nbytes <= crc.BLOCK_BYTES
            and len(deliveries) == 1
            and deliveries[0][1].size == self._chunk.box.size
            and deliveries[0][1].flags.c_contiguous
            and self._in_one_run()
        )

    def follows(self, other: ChunkReader) -> bool:
        """Say whether this chunk starts where ``other``, with its checksum and padding, ends."""
        same = self._pack is other._pack
        return same and self._chunk.at == other._chunk.at + other._extent()

    @staticmethod
    def read_together(readers: Sequence[ChunkReader], rooms: Sequence[memoryview]) -> int:
        """Read small chunks that follow each other in one call; return the bytes read."""
        buffers: list[memoryview] = []
        for reader, room in zip(readers, rooms, strict=True):
            buffers += [room, memoryview(bytearray(reader._extent() - room.nbytes))]
        first, total = readers[0], sum(buffer.nbytes for buffer in buffers)
        first._fill(buffers, 0, total)
        for number, (reader, room) in enumerate(zip(readers, rooms, strict=True)):
            reader._finish(
                isal.crc32c_at(isal.address_of(room), room.nbytes), buffers[2 * number + 1]
            )
        return total

    # -- ranges ----------------------------------------------------------------------------------

    def _deliver(self, region: Box, target: Array) -> int:
        first, end = self._span(region)
        if end - first == target.nbytes and target.flags.c_contiguous:
            return self._range(first, end, _bytes_of(target))
        cut = self._cut(region)
        if cut is None:
            return self._by_rows(region, target)
        dim, count = cut
        read = 0
        for at in range(0, region.shape[dim], count):
            extent = min(count, region.shape[dim] - at)
            selection = (slice(None),) * dim + (slice(at, at + extent),)
            read += self._deliver(_narrow(region, dim, at, extent), target[selection])
        return read

    def _span(self, region: Box) -> tuple[int, int]:
        """Return the bytes of the box from the first to the last element of ``region``."""
        first = last = 0
        for o, n, extent in zip(region.offset, region.shape, self._chunk.box.shape, strict=True):
            first, last = first * extent + o, last * extent + o + n - 1
        return first * self._itemsize, (last + 1) * self._itemsize

    def _cut(self, region: Box) -> tuple[int, int] | None:
        """Return the dim along which to cut a scattered region, and the rows to read at a time.

        Returns None if it is best to read all bytes between its first and last element.
        """
        for dim, extent in enumerate(region.shape):
            if extent > 1:
                row = prod(self._chunk.box.shape[dim + 1 :]) * self._itemsize
                first, end = self._span(_narrow(region, dim, 0, 1))
                if row - (end - first) > crc.BLOCK_BYTES:
                    return dim, 1
                return (dim, max(1, _SLAB_BYTES // row)) if row * extent > _SLAB_BYTES else None
        return None

    def _by_rows(self, region: Box, target: Array) -> int:
        """Read the bytes from a region's first to its last element; copy the region from them."""
        first, end = self._span(region)
        room = np.empty(end - first, dtype=np.uint8)
        read = self._range(first, end, room.data)
        strides: list[int] = []
        step = self._itemsize
        for extent in reversed(self._chunk.box.shape):
            strides.insert(0, step)
            step *= extent
        view = np.ndarray(region.shape, self._kind, buffer=room.data, strides=tuple(strides))
        np.copyto(target.view(self._kind), view)
        return read

    def _range(self, first: int, end: int, into: memoryview) -> int:
        """Read bytes ``first`` … ``end`` of the box; whole blocks go directly to ``into``."""
        block = crc.BLOCK_BYTES
        if first == 0 and end == self._chunk.nbytes:
            return self._runs(0, end, into)
        read = 0
        low = -(-first // block) * block
        high = end if end == self._chunk.nbytes else end // block * block
        if low >= high:
            return self._edge(first, end, into)
        if first < low:
            read += self._edge(first, low, into[: low - first])
        read += self._runs(low, high, into[low - first : high - first])
        if high < end:
            read += self._edge(high, end, into[high - first :])
        return read

    def _edge(self, first: int, end: int, into: memoryview) -> int:
        """Read the blocks around a range into a buffer of their own, and copy the range."""
        block = crc.BLOCK_BYTES
        low, high = first // block * block, min(-(-end // block) * block, self._chunk.nbytes)
        room = memoryview(bytearray(high - low))
        read = self._runs(low, high, room)
        into[:] = room[first - low : end - low]
        return read

    def _runs(self, low: int, high: int, into: memoryview) -> int:
        """Read whole blocks in runs; at the chunk's end its tail with them."""
        file, block = self._pack.file, crc.BLOCK_BYTES
        run = _CALL_BYTES if is_summing(file) else max(file.run_bytes // block, 1) * block
        read = found = 0
        blocks = self._blocks()
        for at in range(low, high, run):
            size = min(run, high - at)
            tail = memoryview(b"")
            if at + size == self._chunk.nbytes and low == 0:
                tail = memoryview(bytearray(self._extent() - self._chunk.nbytes))
            sums = self._read_run(into[at - low : at - low + size], at, tail)
            read += size + tail.nbytes
            if blocks:
                self._compare(sums, blocks, at)
            elif low == 0 and high == self._chunk.nbytes:
                found = crc.combine(found, crc.of_blocks(sums, size), size)
            if tail:
                self._finish(found if not blocks else self._chunk.crc32c, tail)
        return read

    def _read_run(self, into: memoryview, at: int, tail: memoryview) -> list[int]:
        """Read blocks from byte ``at`` of the chunk, then what follows; return their checksums."""
        file = self._pack.file
        if not is_summing(file):
            self._fill([into, tail] if tail else [into], at, into.nbytes + tail.nbytes)
            return crc.block_checksums(isal.address_of(into), into.nbytes)
        got, sums = file.read_checked(into, self._chunk.at + at)
        self._require(got, at, into.nbytes)
        if tail:
            self._fill([tail], at + into.nbytes, tail.nbytes)
        return sums

    def _blocks(self) -> list[int]:
        return crc.from_bytes(self._chunk.blocks)

    def _compare(self, sums: Sequence[int], blocks: Sequence[int], at: int) -> None:
        first = at // crc.BLOCK_BYTES
        if sums == blocks[first : first + len(sums)]:
            return
        for number, found in enumerate(sums, start=first):
            self._expect(found, blocks[number], at=number * crc.BLOCK_BYTES)

    def _finish(self, found: int, tail: memoryview) -> None:
        """Check the whole box, then padding, stored checksum and zeros behind it."""
        self._expect(found, self._chunk.crc32c)
        padding = self._stored - self._chunk.nbytes
        self._check_tail(isal.crc32c(tail[:padding], found), tail[padding:])

    # -- checks ----------------------------------------------------------------------------------

    def _extent(self) -> int:
        """Return the chunk's length with its checksum and, where known, the zeros behind it."""
        end = self._stored + CRC_BYTES
        return self._pack.ends.get(self._chunk.at, self._chunk.at + end) - self._chunk.at

    def _fill(self, buffers: list[memoryview], at: int, wanted: int) -> None:
        self._require(self._pack.file.read_into(buffers, self._chunk.at + at), at, wanted)

    def _require(self, got: int, at: int, wanted: int) -> None:
        if got != wanted:
            raise CorruptError(
                f"{self._pack.origin}: tensor {self._fqn}: needs {wanted} bytes at offset "
                f"{self._chunk.at + at}, the file ends after {got}: it was cut off; load another "
                "step, or restore the file from a copy"
            )

    def _check_tail(self, found: int, tail: memoryview) -> None:
        proper = found.to_bytes(CRC_BYTES, "little") + bytes(len(tail) - CRC_BYTES)
        if tail != proper or len(tail) > CRC_BYTES + ALIGN:
            raise self._damage(f"checksum {found:08x} over what is stored")

    def _expect(self, found: int, wanted: int, *, at: int = 0) -> None:
        if found != wanted:
            raise self._damage(f"checksum {found:08x}, {wanted:08x} was written", at=at)

    def _damage(self, found: str, *, at: int = 0) -> CorruptError:
        box = self._chunk.box
        return CorruptError(
            f"{self._pack.origin}: tensor {self._fqn}: the chunk {list(box.offset)} + "
            f"{list(box.shape)} was damaged at or after offset {self._chunk.at + at} ({found}); "
            "load another step, or restore the file from a copy"
        )


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _narrow(region: Box, dim: int, at: int, extent: int) -> Box:
    offset, shape = list(region.offset), list(region.shape)
    offset[dim] += at
    shape[dim] = extent
    return Box(offset=tuple(offset), shape=tuple(shape))
