"""One writer's pack: which pieces it stores where.

A pack is its chunks back to back, nothing else::

    [the box's elements, padded to a cell, compressed][their CRC32C, 4 bytes][0 … 63 zeros]

The zeros align the next chunk. Checksums and compression are computed by a few threads ahead of
the writing, or by the one that writes, which takes longer and costs less: then bytes are in the
cache when they are copied. `ckpt.unpack` reads what is written here.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from typing import Final, TypeAlias

import msgspec
import numpy as np
from typing_extensions import Buffer

from ckpt import codecs, crc, isal
from ckpt.codecs import Codec
from ckpt.errors import CorruptError
from ckpt.grid import cells, common_grid, is_cell, split_grid
from ckpt.index import ChunkRef, ShardIndex, TensorEntry, encode_index
from ckpt.layout import Box
from ckpt.manifest import (
    ALIGN,
    CRC_BYTES,
    FORMAT,
    FileRecord,
    PackedChunk,
    PackedTensor,
    PackIndex,
    WriterRecord,
    seal,
)
from ckpt.store.base import Store
from ckpt.zarr_dtypes import dtype_of

Payload: TypeAlias = Callable[[ChunkRef], Buffer]
"""Returns the bytes of a chunk of the ``ShardIndex`` that is being written.

Asked for in the order of the index, by one thread; what it returned must not change any more.
"""

Watch: TypeAlias = Callable[[int], None]
"""Told how many more bytes were given to the store; may wait, and may raise to end the writing."""

Bases: TypeAlias = Mapping[tuple[str, Box], tuple[FileRecord, PackedTensor, PackedChunk]]
"""What lies in packs of other steps already, by name and box. See `ckpt.bases`."""

THREADS: Final = max(1, min(4, os.cpu_count() or 1))
AHEAD_BYTES: Final = 64 << 20
"""What is checksummed and compressed before it can be written: memory that a pack takes."""

_AHEAD_PIECES: Final = 256
_INLINE_BYTES: Final = 64 << 10
"""What is smaller is done at once: handing it to a thread costs more."""

_LAYOUTS: Final = 16384
"""How many layouts of tensors are remembered: they are the same at every save."""

_CACHED_BYTES: Final = 8 * crc.BLOCK_BYTES
"""What stays in a processor's cache while two checksums are computed of it."""


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
    boxes = tuple([chunk.box for chunk in entry.chunks])
    return _cell(entry.shape, entry.grid, boxes, itemsize)


@lru_cache(_LAYOUTS)
def _cell(
    shape: tuple[int, ...], grid: tuple[int, ...] | None, boxes: tuple[Box, ...], itemsize: int
) -> tuple[int, ...] | None:
    if grid is None and any(box.shape == shape for box in boxes):
        grid = common_grid(shape, boxes)
    if grid is None or not all(is_cell(box, grid, shape) for box in boxes if box.size):
        return None
    return split_grid(tuple(max(n, 1) for n in grid), shape, itemsize)


@lru_cache(_LAYOUTS)
def pieces(box: Box, cell: tuple[int, ...] | None, itemsize: int) -> tuple[Piece, ...]:
    """Cut a saver's box into what is stored, in the order of its bytes."""
    start, found = 0, []
    for part in [box] if cell is None else cells(box, cell):
        nbytes = part.size * itemsize
        if nbytes:
            padded = cell if part.shape != cell else None
            found.append(Piece(box=part, start=start, nbytes=nbytes, cell=padded))
        start += nbytes
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A piece with its checksums: what is to be stored, and that it is what the index says."""

    chunk: PackedChunk
    body: Buffer
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A piece whose checksums are under way; the ``last`` one of the saver's chunk ``ref``?"""

    ref: ChunkRef
    nbytes: int
    future: Future[_Ready] | _Done
    last: bool


@dataclass(frozen=True, slots=True)
class _Done:
    """What a future is for, where nobody has to be waited for."""

    ready: _Ready

    def result(self) -> _Ready:
        return self.ready

    def cancel(self) -> None:
        pass


def _sums(address: int, nbytes: int) -> tuple[list[int], int]:
    """Return the CRC32C of each block of some memory, and the CRC64 of all, in one pass."""
    blocks: list[int] = []
    crc64 = 0
    for at in range(0, nbytes, _CACHED_BYTES):
        size = min(_CACHED_BYTES, nbytes - at)
        blocks += crc.block_checksums(address + at, size)
        crc64 = isal.crc64_at(address + at, size, crc64)
    return blocks, crc64


def _prepare(piece: Piece, raw: memoryview, *, itemsize: int, codec: Codec | None) -> _Ready:
    """Checksum, pad and compress one piece; ``at`` is not known yet."""
    blocks, crc64 = _sums(isal.address_of(raw), piece.nbytes)
    checksum = whole = crc.of_blocks(blocks, piece.nbytes)
    body: Buffer = raw
    if piece.cell is not None:
        body = pad(raw, piece.box.shape, piece.cell, itemsize)
    stored = None
    if codec is not None:
        body = codecs.encode(codec, body)
        stored = len(body)
    if body is not raw:
        checksum = isal.crc32c(body)
    chunk = PackedChunk(
        box=piece.box,
        at=0,
        nbytes=piece.nbytes,
        crc32c=whole,
        padded=piece.cell is not None,
        stored=stored,
        crc64=crc64,
        blocks=crc.to_bytes(blocks) if len(blocks) > 1 and codec is None else b"",
    )
    return _Ready(chunk=chunk, body=body, checksum=checksum)


class PackWriter:
    """Produces a pack's bytes in order, and then its index.

    Nothing is computed ahead where ``threads`` is 0. ``codecs`` compress the tensors they name.
    ``bases`` are chunks that need not be written again. With ``verify`` the bytes are compared
    with the checksum that ``index`` has of each chunk; the pack must not be published before
    `parts` has come to its end without an error.
    """

    def __init__(
        self,
        index: ShardIndex,
        payload: Payload,
        *,
        verify: bool = True,
        codecs: Mapping[str, Codec | None] | None = None,
        bases: Bases | None = None,
        ahead_bytes: int = AHEAD_BYTES,
        threads: int = THREADS,
    ) -> None:
        self._index, self._payload, self._verify = index, payload, verify
        self._ahead_bytes, self._threads = ahead_bytes if threads else 0, threads
        self._codecs, self._known = codecs or {}, bases or {}
        self._stored: dict[str, list[PackedChunk]] = {fqn: [] for fqn in index.tensors}
        self._cells: dict[str, tuple[int, ...] | None] = {}
        self._files: dict[str, int] = {}
        self._bases: list[FileRecord] = []
        self.at = self.checksum = self._found = 0

    @property
    def tensors(self) -> dict[str, PackedTensor]:
        """What was written, once `parts` has come to its end."""
        return {
            fqn: PackedTensor(
                dtype=entry.dtype,
                shape=entry.shape,
                cell=self._cells[fqn],
                chunks=tuple(self._stored[fqn]),
                codec=self._codecs.get(fqn),
            )
            for fqn, entry in self._index.tensors.items()
        }

    @property
    def bases(self) -> tuple[FileRecord, ...]:
        """The packs of other steps that hold what was not written again."""
        return tuple(self._bases)

    def parts(self) -> Iterator[Buffer]:
        """Yield the pack's bytes. Raises ``CorruptError`` where memory is not what was captured."""
        with ThreadPoolExecutor(self._threads or 1, thread_name_prefix="ckpt-pack") as pool:
            waiting: deque[_Started] = deque()
            flying = 0
            try:
                for started in self._started(pool):
                    waiting.append(started)
                    flying += started.nbytes
                    while waiting and (flying > self._ahead_bytes or len(waiting) > _AHEAD_PIECES):
                        oldest = waiting.popleft()
                        flying -= oldest.nbytes
                        yield from self._placed(oldest)
                while waiting:
                    yield from self._placed(waiting.popleft())
            finally:
                for started in waiting:
                    started.future.cancel()

    def _started(self, pool: ThreadPoolExecutor) -> Iterator[_Started]:
        """Yield every piece with its checksums under way."""
        for fqn, entry in self._index.tensors.items():
            itemsize = dtype_of(entry.dtype, origin=f"tensor {fqn}").itemsize
            cell = self._cells[fqn] = cell_of(entry, itemsize)
            codec = self._codecs.get(fqn)
            for chunk in entry.chunks:
                ref = ChunkRef(writer=self._index.writer, fqn=fqn, dtype=entry.dtype, chunk=chunk)
                raw = memoryview(self._payload(ref)).cast("B")
                if raw.nbytes != (wanted := chunk.box.size * itemsize):
                    raise self._fault(ref, f"are {raw.nbytes} bytes, not {wanted}")
                for piece in pieces(chunk.box, cell, itemsize):
                    end = piece.start + piece.nbytes
                    part = raw[piece.start : end]
                    prepare = partial(_prepare, piece, part, itemsize=itemsize, codec=codec)
                    inline = piece.nbytes <= _INLINE_BYTES or not self._threads
                    future = _Done(prepare()) if inline else pool.submit(prepare)
                    last = end == wanted
                    yield _Started(ref=ref, nbytes=piece.nbytes, future=future, last=last)

    def _check(self, started: _Started, chunk: PackedChunk) -> None:
        """Compare a saver's chunk, once its last piece is there, with what was captured."""
        self._found = crc.combine(self._found, chunk.crc32c, chunk.nbytes)
        if started.last:
            found, self._found = self._found, 0
            if self._verify and found != (wanted := started.ref.chunk.crc32c):
                fault = f"have checksum {found:08x}, {wanted:08x} was captured"
                raise self._fault(started.ref, fault)

    def _fault(self, ref: ChunkRef, found: str) -> CorruptError:
        return CorruptError(
            f"writer {self._index.writer}: tensor {ref.fqn}: the {ref.chunk.nbytes} bytes in "
            f"memory {found}; nothing is written of them: the snapshot is not to be trusted, use "
            "another"
        )

    def _placed(self, started: _Started) -> Iterator[Buffer]:
        """Give a piece its place: in this pack, or where an older step has the same bytes."""
        fqn, ready = started.ref.fqn, started.future.result()
        self._check(started, ready.chunk)
        if (chunk := self._known_as(fqn, ready.chunk)) is not None:
            self._stored[fqn].append(chunk)
            return
        chunk = msgspec.structs.replace(ready.chunk, at=self.at)
        self._stored[fqn].append(chunk)
        nbytes = memoryview(ready.body).nbytes
        end = self.at + nbytes + CRC_BYTES
        tail = ready.checksum.to_bytes(CRC_BYTES, "little") + bytes(-end % ALIGN)
        yield ready.body
        yield tail
        self.checksum = crc.combine(self.checksum, ready.checksum, nbytes)
        self.checksum = isal.crc32c(tail, self.checksum)
        self.at += nbytes + len(tail)

    def _known_as(self, fqn: str, chunk: PackedChunk) -> PackedChunk | None:
        known = self._known.get((fqn, chunk.box))
        if known is None:
            return None
        file, tensor, old = known
        entry = self._index.tensors[fqn]
        same_kind = (tensor.dtype, tensor.shape, tensor.codec) == (
            entry.dtype,
            entry.shape,
            self._codecs.get(fqn),
        )
        same_shape = old.padded == chunk.padded and (
            not chunk.padded or tensor.cell == self._cells[fqn]
        )
        same_bytes = (old.nbytes, old.crc32c, old.crc64) == (
            chunk.nbytes,
            chunk.crc32c,
            chunk.crc64,
        )
        if not (same_kind and same_shape and same_bytes):
            return None
        if file.path not in self._files:
            self._files[file.path] = len(self._bases)
            self._bases.append(file)
        return msgspec.structs.replace(old, base=self._files[file.path])


def pad(
    raw: memoryview, shape: tuple[int, ...], cell: tuple[int, ...], itemsize: int
) -> memoryview:
    """Return ``raw``, an array of ``shape``, in the low corner of zeros of shape ``cell``."""
    kind = np.dtype((np.void, itemsize))
    full = np.zeros(cell, dtype=kind)
    full[tuple(slice(n) for n in shape)] = np.frombuffer(raw, dtype=kind).reshape(shape)
    return full.reshape(-1).view(np.uint8).data


def _watched(parts: Iterator[Buffer], watch: Watch) -> Iterator[Buffer]:
    for part in parts:
        yield part
        watch(memoryview(part).nbytes)


def content_tag(index: ShardIndex) -> str:
    """Return a name for what ``index`` describes, from its checksums: same bytes, same name."""
    return sha256(encode_index(index)).hexdigest()[:12]


def write(
    store: Store,
    writer: PackWriter,
    index: ShardIndex,
    *,
    folder: str,
    stem: str,
    watch: Watch | None = None,
) -> WriterRecord:
    """Write a pack and its index into a step's ``folder``; both are durable on return.

    The files are called ``stem``; no two contents may share one.
    """
    path = f"data/{stem}.pack"
    parts = writer.parts() if watch is None else _watched(writer.parts(), watch)
    nbytes = store.write(f"{folder}/{path}", parts)
    packed = PackIndex(
        format=FORMAT,
        run=index.run,
        step=index.step,
        generation=index.generation,
        writer=index.writer,
        world_size=index.world_size,
        pack=path,
        pack_bytes=nbytes,
        tensors=writer.tensors,
        bases=writer.bases,
        values=index.values,
        rank_values=index.rank_values,
        aliases=index.aliases,
    )
    data = seal(packed)
    described = f"index/{stem}.json"
    store.write(f"{folder}/{described}", [data])
    return WriterRecord(
        writer=index.writer,
        pack=FileRecord(path=path, nbytes=nbytes, crc32c=writer.checksum),
        index=FileRecord(path=described, nbytes=len(data), crc32c=isal.crc32c(data)),
        bases=writer.bases,
    )
