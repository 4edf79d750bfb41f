"""One writer's pack: which pieces it stores where, and how a piece is read back and checked.

A pack is its chunks back to back, nothing else::

    [elements of the box, padded to a cell at an edge][their CRC32C, 4 bytes][0 … 63 zeros]

The zeros align the next chunk. The whole pack is checked on a full read: elements and padding
against checksums, the rest against what it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TypeAlias

import msgspec
import numpy as np
from typing_extensions import Buffer

from ckpt.errors import CorruptError
from ckpt.grid import cells, common_grid, is_cell, split_grid
from ckpt.index import ChunkRef, ShardIndex, TensorEntry, encode_index
from ckpt.isal import crc32c
from ckpt.layout import Box
from ckpt.manifest import (
    ALIGN,
    CRC_BYTES,
    PackedChunk,
    PackedTensor,
    PackIndex,
    WriterRecord,
    seal,
    stored_bytes,
)
from ckpt.store.base import Readable, Store
from ckpt.zarr_dtypes import dtype_of

Payload: TypeAlias = Callable[[ChunkRef], Buffer]
"""Returns the bytes of a chunk of the ``ShardIndex`` that is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a saver's chunk that becomes a chunk of the pack.

    ``start`` is its offset in the saver's chunk in bytes; ``cell`` the shape it is stored with,
    None where it is stored as it is.
    """

    box: Box
    start: int
    nbytes: int
    cell: tuple[int, ...] | None


def cell_of(entry: TensorEntry, itemsize: int) -> tuple[int, ...] | None:
    """Return the Zarr cell this writer stores a tensor with; None without a known grid."""
    boxes = [chunk.box for chunk in entry.chunks]
    grid = entry.grid
    if grid is None and any(box.shape == entry.shape for box in boxes):
        grid = common_grid(entry.shape, boxes)
    if grid is None or not all(is_cell(box, grid, entry.shape) for box in boxes if box.size):
        return None
    return split_grid(tuple(max(n, 1) for n in grid), entry.shape, itemsize)


def pieces(box: Box, cell: tuple[int, ...] | None, itemsize: int) -> Iterator[Piece]:
    """Cut a saver's box into what is stored, in the order of its bytes."""
    start = 0
    for part in [box] if cell is None else cells(box, cell):
        nbytes = part.size * itemsize
        if nbytes:
            padded = cell if part.shape != cell else None
            yield Piece(box=part, start=start, nbytes=nbytes, cell=padded)
        start += nbytes


class PackWriter:
    """Lays out a pack while its parts stream to a store; then knows its index."""

    def __init__(self, index: ShardIndex, payload: Payload, *, verify: bool) -> None:
        self._index, self._payload, self._verify = index, payload, verify
        self.tensors: dict[str, PackedTensor] = {}
        self.at = 0

    def parts(self) -> Iterator[Buffer]:
        """Yield the pack's bytes. Raises ``CorruptError`` when a chunk is not as captured."""
        for fqn, entry in self._index.tensors.items():
            itemsize = dtype_of(entry.dtype, origin=f"tensor {fqn}").itemsize
            cell = cell_of(entry, itemsize)
            stored: list[PackedChunk] = []
            for chunk in entry.chunks:
                ref = ChunkRef(writer=self._index.writer, fqn=fqn, dtype=entry.dtype, chunk=chunk)
                data = memoryview(self._payload(ref)).cast("B")
                if self._verify:
                    self._check(ref, data)
                for piece in pieces(chunk.box, cell, itemsize):
                    raw = data[piece.start : piece.start + piece.nbytes]
                    yield from self._piece(piece, raw, itemsize, stored)
            self.tensors[fqn] = PackedTensor(
                dtype=entry.dtype, shape=entry.shape, cell=cell, chunks=tuple(stored)
            )

    def _check(self, ref: ChunkRef, data: memoryview) -> None:
        found = crc32c(data)
        if data.nbytes != ref.chunk.nbytes or found != ref.chunk.crc32c:
            raise CorruptError(
                f"step {self._index.step}, writer {self._index.writer}: tensor {ref.fqn}: its "
                f"{data.nbytes} bytes in memory have checksum {found:08x}, "
                f"{ref.chunk.crc32c:08x} was captured; nothing is written of them: the snapshot "
                "is not to be trusted, use another"
            )

    def _piece(
        self, piece: Piece, raw: memoryview, itemsize: int, stored: list[PackedChunk]
    ) -> Iterator[Buffer]:
        checksum = crc32c(raw)
        stored.append(
            PackedChunk(
                box=piece.box,
                at=self.at,
                nbytes=piece.nbytes,
                crc32c=checksum,
                padded=piece.cell is not None,
            )
        )
        body: Buffer = raw
        if piece.cell is not None:
            body = pad(raw, piece.box.shape, piece.cell, itemsize)
            checksum = crc32c(body)
        end = self.at + memoryview(body).nbytes + CRC_BYTES
        gap = -end % ALIGN
        yield body
        yield checksum.to_bytes(CRC_BYTES, "little") + bytes(gap)
        self.at = end + gap


def pad(
    raw: memoryview, shape: tuple[int, ...], cell: tuple[int, ...], itemsize: int
) -> memoryview:
    """Return ``raw``, an array of ``shape``, in the low corner of zeros of shape ``cell``."""
    kind = np.dtype((np.void, itemsize))
    full = np.zeros(cell, dtype=kind)
    full[tuple(slice(n) for n in shape)] = np.frombuffer(raw, dtype=kind).reshape(shape)
    return full.reshape(-1).view(np.uint8).data


def content_tag(index: ShardIndex) -> str:
    """Return a name for what ``index`` describes, from its checksums: same bytes, same name."""
    return sha256(encode_index(index)).hexdigest()[:12]


def write(
    store: Store,
    index: ShardIndex,
    payload: Payload,
    *,
    folder: str,
    stem: str,
    verify: bool = True,
) -> WriterRecord:
    """Write a pack and its index into a step's ``folder``; both are durable on return.

    The files are called ``stem``; no two contents may share one. ``verify`` checks every chunk
    against the checksum ``index`` has for it, before it is written.
    """
    writer = PackWriter(index, payload, verify=verify)
    pack = store.write(f"{folder}/data/{stem}.pack", writer.parts())
    pack = msgspec.structs.replace(pack, path=f"data/{stem}.pack")
    packed = PackIndex(
        run=index.run,
        step=index.step,
        generation=index.generation,
        writer=index.writer,
        world_size=index.world_size,
        pack=pack.path,
        pack_bytes=pack.nbytes,
        tensors=writer.tensors,
        values=index.values,
        rank_values=index.rank_values,
        aliases=index.aliases,
    )
    described = store.write(f"{folder}/index/{stem}.json", [seal(packed)])
    described = msgspec.structs.replace(described, path=f"index/{stem}.json")
    return WriterRecord(writer=index.writer, pack=pack, index=described)


class PackReader:
    """Reads the chunks of one pack and checks every byte on the way."""

    def __init__(self, file: Readable, index: PackIndex, *, origin: str) -> None:
        self._file, self._index, self._origin = file, index, origin
        starts = sorted(c.at for tensor in index.tensors.values() for c in tensor.chunks)
        self._ends = dict(pairwise([*starts, index.pack_bytes]))

    def read(self, fqn: str, chunk: PackedChunk, into: memoryview) -> None:
        """Read the elements of a chunk's box into ``into``. Raises ``CorruptError``."""
        tensor = self._index.tensors[fqn]
        stored = stored_bytes(chunk, tensor)
        extent = self._ends[chunk.at] - chunk.at
        low_part = tensor.cell is None or chunk.box.shape[1:] == tensor.cell[1:]
        if not chunk.padded or low_part:  # the box's bytes come first, in one run
            tail = memoryview(bytearray(extent - chunk.nbytes))
            self._fill([into, tail], fqn, chunk, extent)
            found = crc32c(into)
            self._expect(found == chunk.crc32c, fqn, chunk, f"{found:08x}")
            found = crc32c(tail[: stored - chunk.nbytes], found)
            rest = tail[stored - chunk.nbytes :]
        else:
            whole = memoryview(bytearray(extent))
            self._fill([whole], fqn, chunk, extent)
            found, rest = crc32c(whole[:stored]), whole[stored:]
            kind = np.dtype((np.void, chunk.nbytes // chunk.box.size))
            full = np.frombuffer(whole[:stored], kind).reshape(tensor.cell or ())
            box = np.frombuffer(into, kind).reshape(chunk.box.shape)
            box[...] = full[tuple(slice(n) for n in chunk.box.shape)]
            self._expect(crc32c(into) == chunk.crc32c, fqn, chunk, f"{crc32c(into):08x}")
        proper = found.to_bytes(CRC_BYTES, "little") + bytes(len(rest) - CRC_BYTES)
        self._expect(rest == proper, fqn, chunk, f"{found:08x} over padding and alignment")

    def _fill(self, buffers: list[memoryview], fqn: str, chunk: PackedChunk, extent: int) -> None:
        got = self._file.read_into(buffers, chunk.at)
        if got != extent:
            raise CorruptError(
                f"{self._origin}: tensor {fqn}: needs {extent} bytes at offset {chunk.at}, the "
                f"file ends after {got}: it was cut off; load another step, or restore the file "
                "from a copy"
            )

    def _expect(self, good: bool, fqn: str, chunk: PackedChunk, found: str) -> None:
        if not good:
            raise CorruptError(
                f"{self._origin}: tensor {fqn}: the chunk of {chunk.nbytes} bytes at offset "
                f"{chunk.at} was damaged (checksum {found}, {chunk.crc32c:08x} was written); load "
                "another step, or restore the file from a copy"
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()
