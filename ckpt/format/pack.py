"""The pack of one writer: the cutting of its tensors into pieces, and the writing of them.

A pack is its chunks back to back, nothing else::

    [the box's elements, padded to a cell, compressed][their CRC32C, 4 bytes][0 … 63 zeros]

The zeros align the next chunk. A few threads compute checksums and compression ahead of the
writing. Without threads, the writing thread does it, which takes longer and costs less: the bytes
are then in the cache when they are copied. A store that copies the bytes it writes computes the
checksums in that very copy (`holdfast.ckpt.native.piece_copy`), except for chunks that are
compressed, padded or searched for in an earlier step. `holdfast.ckpt.format.unpack` reads packs.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from typing import Final, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
from typing_extensions import Buffer

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format import codecs
from holdfast.ckpt.format.codecs import Codec
from holdfast.ckpt.format.manifest import (
    ALIGN,
    CRC_BYTES,
    FORMAT,
    FileRecord,
    PackedChunk,
    PackedTensor,
    PackIndex,
    WriterRecord,
)
from holdfast.ckpt.format.sealed import seal
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.grid import cells, common_grid, is_cell, split_grid
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.shard_index import ChunkRef, ShardIndex, TensorEntry, encode_index
from holdfast.ckpt.native import crc, isal
from holdfast.ckpt.native.piece_copy import PieceCopy
from holdfast.ckpt.native.sums import combined
from holdfast.ckpt.store.base import Part, Store, is_poured
from holdfast.ckpt.store.local import DirectStore

Payload: TypeAlias = Callable[[ChunkRef], Buffer]
"""Returns the bytes of a chunk of the ``ShardIndex`` that is being written.

One thread calls it, in the order of the index; the returned bytes must not change any more.
"""

Watch: TypeAlias = Callable[[int], None]
"""Called with the number of bytes newly given to the store; may wait, or raise to end it."""

Bases: TypeAlias = Mapping[tuple[str, Box], tuple[FileRecord, PackedTensor, PackedChunk]]
"""Tensors that lie in packs of other steps, by name and box (`holdfast.ckpt.checkpoints.bases`)."""

_Part = TypeVar("_Part", bound=Part)

THREADS: Final = max(1, min(4, os.cpu_count() or 1))
AHEAD_BYTES: Final = 64 << 20
"""The bytes that are checksummed and compressed ahead of the writing: the memory of a writer."""

_AHEAD_PIECES: Final = 256
_INLINE_BYTES: Final = 64 << 10
"""Smaller pieces are processed at once: handing them to a thread costs more."""

_LAYOUTS: Final = 16384
"""The number of tensor layouts that are cached: they are the same at every save."""

_CACHED_BYTES: Final = 8 * crc.BLOCK_BYTES
"""The bytes that stay in a processor's cache while two checksums of them are computed."""

_WATCH_BYTES: Final = 4 << 10
"""The bytes given to the store between two calls of the watch: reading a clock costs time, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPiece:
    """A part of a saver's chunk that becomes a chunk of the pack.

    ``start`` is its offset in the saver's chunk in bytes. ``cell`` is the shape to which it is
    padded; None if it is stored without padding.
    """

    box: Box
    start: int
    nbytes: int
    cell: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The storage of a tensor: its Zarr cell (None without a grid), and the pieces by chunk."""

    cell: tuple[int, ...] | None
    pieces: tuple[tuple[ChunkPiece, ...], ...]


def cut(entry: TensorEntry, itemsize: int) -> Cut:
    """Return how a writer stores a tensor; cached, for it is the same at every save."""
    boxes = tuple([chunk.box for chunk in entry.chunks])
    return _cut(entry.shape, entry.grid, boxes, itemsize)


@lru_cache(_LAYOUTS)
def _cut(
    shape: tuple[int, ...], grid: tuple[int, ...] | None, boxes: tuple[Box, ...], itemsize: int
) -> Cut:
    cell = _cell(shape, grid, boxes, itemsize)
    return Cut(cell=cell, pieces=tuple([pieces(box, cell, itemsize) for box in boxes]))


def _cell(
    shape: tuple[int, ...], grid: tuple[int, ...] | None, boxes: tuple[Box, ...], itemsize: int
) -> tuple[int, ...] | None:
    if grid is None and any(box.shape == shape for box in boxes):
        grid = common_grid(shape, boxes)
    if grid is None or not all(is_cell(box, grid, shape) for box in boxes if box.size):
        return None
    return split_grid(tuple(max(n, 1) for n in grid), shape, itemsize)


def pieces(box: Box, cell: tuple[int, ...] | None, itemsize: int) -> tuple[ChunkPiece, ...]:
    """Cut a saver's box into the pieces to store, in the order of its bytes."""
    start, found = 0, []
    for part in [box] if cell is None else cells(box, cell):
        nbytes = part.size * itemsize
        if nbytes:
            padded = cell if part.shape != cell else None
            found.append(ChunkPiece(box=part, start=start, nbytes=nbytes, cell=padded))
        start += nbytes
    return tuple(found)


@dataclass(slots=True)
class _Ready:
    """The stored bytes of a piece, and its checksums: ``stored`` is that of ``body``."""

    body: Buffer
    stored: int
    crc32c: int
    crc64: int
    blocks: list[int]


@dataclass(slots=True)
class _Started:
    """A piece whose checksums are in progress; ``last`` if it ends the saver's chunk ``ref``."""

    ref: ChunkRef
    piece: ChunkPiece
    work: Future[_Ready] | _Ready | PieceCopy
    last: bool


def _sums(address: int, nbytes: int) -> tuple[list[int], int]:
    """Return the CRC32C of each block of some memory, and the CRC64 of the whole, in one pass."""
    blocks: list[int] = []
    crc64 = 0
    for at in range(0, nbytes, _CACHED_BYTES):
        size = min(_CACHED_BYTES, nbytes - at)
        blocks += crc.block_checksums(address + at, size)
        crc64 = isal.crc64_at(address + at, size, crc64)
    return blocks, crc64


def _prepare(piece: ChunkPiece, raw: memoryview, *, itemsize: int, codec: Codec | None) -> _Ready:
    """Checksum, pad and compress one piece."""
    blocks, crc64 = _sums(isal.address_of(raw), piece.nbytes)
    checksum = whole = crc.of_blocks(blocks, piece.nbytes)
    body: Buffer = raw
    if piece.cell is not None:
        body = pad(raw, piece.box.shape, piece.cell, itemsize)
    if codec is not None:
        body = codecs.encode(codec, body)
    if body is not raw:
        checksum = isal.crc32c(body)
    return _Ready(body=body, stored=checksum, crc32c=whole, crc64=crc64, blocks=blocks)


class PackWriter:
    """Produces a pack's bytes in order, and then its index.

    With ``threads`` 0 nothing is computed ahead. ``codecs`` compress the tensors they name.
    ``bases`` are chunks that need not be written again. With ``verify`` the bytes are compared with
    the checksum that ``index`` has of each chunk; do not publish the pack before `parts` has ended
    without an error.
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
        self._written: list[tuple[int, int]] = []
        self.at = self._found = 0

    @property
    def checksum(self) -> int:
        """The CRC32C of the pack, once `parts` has ended."""
        sums = np.array([each for each, _ in self._written], dtype=np.uint32)
        lengths = np.array([nbytes for _, nbytes in self._written], dtype=np.int64)
        whole = np.array([0], dtype=np.int64), np.array([len(sums)], dtype=np.int64)
        return int(combined(sums, lengths, starts=whole[0], ends=whole[1])[0])

    @property
    def tensors(self) -> dict[str, PackedTensor]:
        """The written tensors, once `parts` has ended."""
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
        """The packs of other steps that hold the chunks that were not written again."""
        return tuple(self._bases)

    def parts(self) -> Iterator[Buffer]:
        """Yield the pack's bytes; raises ``CorruptError`` if memory changed since the capture."""
        return cast("Iterator[Buffer]", self._parts(poured=False))  # no part is a PieceCopy then

    def copied_parts(self) -> Iterator[Part]:
        """Yield the pack's bytes as `parts` does, to a caller that copies each before the next."""
        return self._parts(poured=True)

    def _parts(self, *, poured: bool) -> Iterator[Buffer | PieceCopy]:
        with ThreadPoolExecutor(self._threads or 1, thread_name_prefix="ckpt-pack") as pool:
            waiting: deque[_Started] = deque()
            flying = 0
            try:
                for started in self._started(partial(self._start, pool), poured=poured):
                    waiting.append(started)
                    flying += started.piece.nbytes
                    while waiting and (flying > self._ahead_bytes or len(waiting) > _AHEAD_PIECES):
                        oldest = waiting.popleft()
                        flying -= oldest.piece.nbytes
                        yield from self._placed(oldest)
                while waiting:
                    yield from self._placed(waiting.popleft())
            finally:
                for started in waiting:
                    if isinstance(started.work, Future):
                        started.work.cancel()

    def _start(
        self,
        pool: ThreadPoolExecutor,
        piece: ChunkPiece,
        raw: memoryview,
        *,
        itemsize: int,
        codec: Codec | None,
    ) -> Future[_Ready] | _Ready:
        """Start to prepare a piece: on a thread if there are any and the piece is large enough."""
        if not self._threads or piece.nbytes <= _INLINE_BYTES:
            return _prepare(piece, raw, itemsize=itemsize, codec=codec)
        return pool.submit(_prepare, piece, raw, itemsize=itemsize, codec=codec)

    def _started(
        self, start: Callable[..., Future[_Ready] | _Ready], *, poured: bool
    ) -> Iterator[_Started]:
        """Yield every piece, its checksums in progress, or due when it is copied (``poured``)."""
        for fqn, entry in self._index.tensors.items():
            itemsize = dtype_of(entry.dtype, origin=f"tensor {fqn}").itemsize
            how, codec = cut(entry, itemsize), self._codecs.get(fqn)
            self._cells[fqn] = how.cell
            for chunk, parts in zip(entry.chunks, how.pieces, strict=True):
                ref = ChunkRef(writer=self._index.writer, fqn=fqn, dtype=entry.dtype, chunk=chunk)
                raw = memoryview(self._payload(ref)).cast("B")
                if raw.nbytes != (wanted := chunk.box.size * itemsize):
                    raise self._fault(ref, f"are {raw.nbytes} bytes, not {wanted}")
                for piece in parts:
                    end = piece.start + piece.nbytes
                    part = raw[piece.start : end]
                    as_it_is = codec is None and piece.cell is None
                    work: Future[_Ready] | _Ready | PieceCopy
                    if poured and as_it_is and (fqn, piece.box) not in self._known:
                        work = PieceCopy(part)
                    else:
                        work = start(piece, part, itemsize=itemsize, codec=codec)
                    yield _Started(ref=ref, piece=piece, work=work, last=end == wanted)

    def _check(self, started: _Started, crc32c: int) -> None:
        """Compare a saver's chunk, once its last piece is known, with the captured checksum."""
        self._found = crc.combine(self._found, crc32c, started.piece.nbytes)
        if started.last:
            found, self._found = self._found, 0
            if self._verify and found != (wanted := started.ref.chunk.crc32c):
                fault = f"have checksum {found:08x}, {wanted:08x} was captured"
                raise self._fault(started.ref, fault)

    def _fault(self, ref: ChunkRef, found: str) -> CorruptError:
        return CorruptError(
            f"writer {self._index.writer}: tensor {ref.fqn}: the {ref.chunk.nbytes} bytes in "
            f"memory {found}; none of them is published: the snapshot is damaged, use another"
        )

    def _placed(self, started: _Started) -> Iterator[Buffer | PieceCopy]:
        """Place a piece: in this pack, or where an older step has the same bytes."""
        fqn, piece, work = started.ref.fqn, started.piece, started.work
        if isinstance(work, PieceCopy):
            yield work
            blocks, crc64 = work.sums()
            checksum = crc.of_blocks(blocks, piece.nbytes)
            self._check(started, checksum)
            self._stored[fqn].append(self._chunk(piece, checksum, crc64, blocks))
            yield self._ended(checksum, piece.nbytes)
            return
        ready = work if isinstance(work, _Ready) else work.result()
        self._check(started, ready.crc32c)
        nbytes = memoryview(ready.body).nbytes
        is_compressed = self._codecs.get(fqn) is not None
        chunk = self._chunk(
            piece,
            ready.crc32c,
            ready.crc64,
            ready.blocks,
            stored=nbytes if is_compressed else None,
        )
        known = self._known_as(fqn, chunk)
        self._stored[fqn].append(known or chunk)
        if known is None:
            yield ready.body
            yield self._ended(ready.stored, nbytes)

    def _chunk(
        self,
        piece: ChunkPiece,
        crc32c: int,
        crc64: int,
        blocks: list[int],
        stored: int | None = None,
    ) -> PackedChunk:
        """Return the index entry of the piece that is stored next."""
        has_blocks = len(blocks) > 1 and stored is None
        return PackedChunk(
            box=piece.box,
            at=self.at,
            nbytes=piece.nbytes,
            crc32c=crc32c,
            padded=piece.cell is not None,
            stored=stored,
            crc64=crc64,
            blocks=crc.to_bytes(blocks) if has_blocks else b"",
        )

    def _ended(self, checksum: int, nbytes: int) -> bytes:
        """Return the checksum and alignment behind ``nbytes`` stored ones; advance past them."""
        end = self.at + nbytes + CRC_BYTES
        tail = checksum.to_bytes(CRC_BYTES, "little") + bytes(-end % ALIGN)
        self._written += ((checksum, nbytes), (isal.crc32c(tail), len(tail)))
        self.at += nbytes + len(tail)
        return tail

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


def _watched(parts: Iterator[_Part], watch: Watch) -> Iterator[_Part]:
    given = 0
    for part in parts:
        yield part
        given += part.nbytes if is_poured(part) else memoryview(part).nbytes
        if given >= _WATCH_BYTES:
            watch(given)
            given = 0
    if given:
        watch(given)


def content_tag(index: ShardIndex) -> str:
    """Return a name made of the checksums in ``index``: same bytes, same name."""
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
    if isinstance(store, DirectStore):
        copied = writer.copied_parts()
        nbytes = store.write(f"{folder}/{path}", _watched(copied, watch) if watch else copied)
    else:
        parts = writer.parts()
        nbytes = store.write(f"{folder}/{path}", _watched(parts, watch) if watch else parts)
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
