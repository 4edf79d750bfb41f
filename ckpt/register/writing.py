"""The making of a register from the indexes of all writers, one after the other.

Only what names and tensors need stays in memory: the entries of the chunks pass through
`holdfast.ckpt.register.runs`. All that the union of the indexes must fulfil is checked on the way.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Final

import msgspec
import numpy as np

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format import codecs
from holdfast.ckpt.format.codecs import Codec
from holdfast.ckpt.format.columns import ChunkColumns, HeldTensor
from holdfast.ckpt.format.manifest import (
    ALIGN,
    CRC_BYTES,
    BlockRecord,
    PackIndex,
    TensorRecord,
    WriterRecord,
    path_of,
)
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.grid import chunk_cell, fault_of_cover
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.shard_index import owner_of
from holdfast.ckpt.geometry.spans import covers
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.register.records import (
    BLOCK_BYTES,
    BLOCK_RECORDS,
    CODEC,
    NO_NAME,
    PAGE_BLOCKS,
    Corner,
    ListedBlock,
    RankValue,
    RegisterRoot,
    around,
    listed_of,
)
from holdfast.ckpt.register.runs import (
    RUN_BYTES,
    SortedRecords,
    SortedRuns,
    UnsortedRecords,
    numbered,
)
from holdfast.ckpt.store.parallel import parallel
from holdfast.ckpt.types import Json

_POOLED: Final = BLOCK_RECORDS // 2
"""A name with fewer records shares its block with others."""

_THREADS: Final = 2
_TOGETHER: Final = 16
"""The blocks that one thread compresses at a time."""


@dataclass(slots=True, kw_only=True)
class _Tensor:
    """The facts about a tensor on which its writers must agree, and its chunks' cells."""

    dtype: str
    shape: tuple[int, ...]
    writer: int
    cells: set[tuple[int, ...] | None] = field(default_factory=set)
    codecs: set[Codec | None] = field(default_factory=set)


@dataclass(slots=True)
class _RegisterFile:
    """The file so far: its bytes and their checksum."""

    nbytes: int = 0
    crc32c: int = 0

    def block(self, body: bytes, data: bytes | None = None) -> tuple[BlockRecord, bytes]:
        """Return a block's record and its bytes, which follow all others.

        ``data`` is the compressed body, if that is known.
        """
        data = codecs.encode(CODEC, body) if data is None else data
        place = BlockRecord(at=self.nbytes, stored=len(data), crc32c=crc32c(data), nbytes=len(body))
        self.nbytes += len(data)
        self.crc32c = crc32c(data, self.crc32c)
        return place, data


class RegisterBuilder(Closing):
    """Collects writers with their indexes, in any order; then `parts` are the register's bytes.

    Raises ``CorruptError``, which begins with ``origin``, where the indexes contradict each other.
    """

    def __init__(self, *, origin: str, run_bytes: int = RUN_BYTES) -> None:
        self._origin = origin
        self._chunks = SortedRuns(run_bytes=run_bytes)
        self._values = SortedRuns(run_bytes=run_bytes)
        self._writers = SortedRuns(run_bytes=run_bytes)
        self._kinds: dict[str, _Tensor] = {}
        self._borrowed: dict[str, array[int]] = {}
        self._file = _RegisterFile()
        self._encoder = msgspec.json.Encoder()
        self._step: tuple[str, int, int, int] | None = None
        self.tensors: dict[str, TensorRecord] = {}
        """Every tensor, once `parts` has ended."""
        self.values: dict[str, Json] = {}
        self.aliases: dict[str, str] = {}
        self.chunks = 0
        self.root = BlockRecord(at=0, stored=0, crc32c=0, nbytes=0)
        """The block to begin with, once `parts` has ended."""

    @property
    def checksum(self) -> int:
        """The CRC32C of the register, once `parts` has ended."""
        return self._file.crc32c

    # -- collecting ------------------------------------------------------------------------------

    def add(self, records: Sequence[WriterRecord], columns: ChunkColumns) -> None:
        """Take some writers, with the columns of their indexes in the same order."""
        for index in columns.indexes:
            self._check_step(index)
            if index.pack_bytes % ALIGN:
                raise self._unaligned(index)
            self.values |= index.values
            self.aliases |= index.aliases
            self._add_values(index)
        encoded = [msgspec.json.encode(record) for record in records]
        self._writers.add(numbered(NO_NAME, [record.writer for record in records], encoded))
        full = np.bincount(columns.tensor, minlength=len(columns.tensors)) > 0
        for tensor, holder, has_chunks in zip(columns.tensors, columns.holders, full, strict=True):
            self._agree(tensor, columns.indexes[holder].writer, has_chunks=bool(has_chunks))
        self._check_places(columns)
        self._add_chunks(columns)

    def _add_values(self, index: PackIndex) -> None:
        for name, tree in index.rank_values.items():
            path, rank = owner_of(name, writer=index.writer)
            value = RankValue(rank=rank, writer=index.writer, name=name, tree=tree)
            encoded = msgspec.json.encode(value, order="deterministic")
            self._values.add(numbered(path, [rank], [encoded]))

    def _add_chunks(self, columns: ChunkColumns) -> None:
        tensors, chunks = columns.tensors, columns.chunks
        cells: Iterable[Corner | None] = repeat(None, len(chunks))
        if columns.padded.any():
            of = [tensors[each].cell for each in columns.tensor.tolist()]
            cells = [c if p else None for c, p in zip(of, columns.padded.tolist(), strict=True)]
        writers = np.array([index.writer for index in columns.indexes])[columns.index].tolist()
        lines = self._encoder.encode_lines(listed_of(writers, chunks, cells))
        self._chunks.add(
            UnsortedRecords(
                names=[tensor.fqn for tensor in tensors],
                dims=[len(tensor.shape) for tensor in tensors],
                which=columns.tensor,
                spans=columns.spans,
                encoded=lines.split(b"\n")[:-1],
            )
        )
        self.chunks += len(chunks)

    def _check_places(self, columns: ChunkColumns) -> None:
        """Refuse chunks that are not aligned; note the places of those in other steps' packs."""
        if (odd := np.flatnonzero(columns.own & (columns.at % ALIGN != 0))).size:
            raise self._unaligned(columns.indexes[columns.index[odd[0]]])
        borrowed = np.flatnonzero(~columns.own)
        ends = (columns.at + columns.stored_bytes + CRC_BYTES)[borrowed].tolist()
        for number, end in zip(borrowed.tolist(), ends, strict=True):
            chunk, index = columns.chunks[number], columns.indexes[columns.index[number]]
            self._borrowed.setdefault(path_of(chunk, index), array("q")).extend((chunk.at, end))

    def _agree(self, tensor: HeldTensor, writer: int, *, has_chunks: bool) -> None:
        fqn = tensor.fqn
        kind = self._kinds.get(fqn)
        if kind is None:
            kind = _Tensor(dtype=tensor.dtype, shape=tensor.shape, writer=writer)
            self._kinds[fqn] = kind
        if kind.dtype != tensor.dtype or kind.shape != tensor.shape:
            raise CorruptError(
                f"{self._origin}: tensor {fqn}: writer {writer} has {tensor.dtype} "
                f"{tensor.shape}, writer {kind.writer} {kind.dtype} {kind.shape}; nothing was "
                "committed: save again, every rank with the same state"
            )
        if has_chunks:
            kind.cells.add(tensor.cell)
            kind.codecs.add(tensor.codec)

    def _check_step(self, index: PackIndex) -> None:
        found = (index.run, index.step, index.generation, index.world_size)
        self._step = self._step or found
        if found != self._step:
            raise CorruptError(
                f"{self._origin}: the index of writer {index.writer} is of run, step, generation "
                f"and world size {found}, another of {self._step}; save again"
            )

    def _unaligned(self, index: PackIndex) -> CorruptError:
        """Return the error for a pack in which a chunk's end does not follow from its start.

        A reader that sees few of a pack's chunks needs that.
        """
        return CorruptError(
            f"{self._origin}: {index.pack} of writer {index.writer} has chunks that are not at "
            f"multiples of {ALIGN}; write it with Holdfast, or with fewer writers"
        )

    # -- writing ---------------------------------------------------------------------------------

    def parts(self) -> Iterator[bytes]:
        """Yield the bytes of the register."""
        self._check_borrowed()
        file = self._file
        chunks = yield from _section(file, self._covered())
        writers = yield from _section(file, self._writers.sorted())
        ranks: dict[str, tuple[tuple[int, int], ...]] = {}
        values = yield from _section(file, self._owned(ranks))
        root = RegisterRoot(chunks=chunks, writers=writers, values=values, ranks=ranks)
        self.root, data = file.block(msgspec.json.encode(root, order="deterministic"))
        yield data

    def close(self) -> None:
        """Remove what was sorted outside of memory."""
        for runs in (self._chunks, self._values, self._writers):
            runs.close()

    def _covered(self) -> Iterator[SortedRecords]:
        """Yield the chunks of each tensor, after checking that they hold it exactly once."""
        for records in self._chunks.sorted():
            kind, spans = self._kinds[records.name], records.spans
            is_whole = covers(kind.shape, spans)
            if is_whole and len(kind.cells) == 1 and None not in kind.cells:
                self._describe(records.name, None)
            else:
                corners = zip(spans.lo.T.tolist(), (spans.hi - spans.lo).T.tolist(), strict=True)
                boxes = [Box(offset=tuple(low), shape=tuple(size)) for low, size in corners]
                if not is_whole and (fault := fault_of_cover(kind.shape, boxes)):
                    raise self._not_whole(records.name, fault)
                self._describe(records.name, boxes)
            yield records
        for fqn in self._kinds.keys() - self.tensors.keys():
            if fault := fault_of_cover(self._kinds[fqn].shape, []):
                raise self._not_whole(fqn, fault)
            self._describe(fqn, [])

    def _describe(self, fqn: str, boxes: Sequence[Box] | None) -> None:
        """Add a tensor's record; without ``boxes`` all its writers know one grid."""
        kind = self._kinds[fqn]
        if len(kind.codecs) > 1:
            raise CorruptError(
                f"{self._origin}: tensor {fqn}: its writers compressed it in different ways "
                f"({codecs.spellings([*kind.codecs])}); nothing was committed: save again, every "
                "rank with the same compression"
            )
        itemsize = dtype_of(kind.dtype, origin=f"{self._origin}: tensor {fqn}").itemsize
        cell = next(iter(kind.cells), None) if boxes is None else None
        self.tensors[fqn] = TensorRecord(
            dtype=kind.dtype,
            shape=kind.shape,
            cell=cell or chunk_cell(kind.shape, boxes or (), kind.cells, itemsize),
            codec=next(iter(kind.codecs), None),
        )

    def _not_whole(self, fqn: str, fault: str) -> CorruptError:
        return CorruptError(
            f"{self._origin}: tensor {fqn} of shape {self._kinds[fqn].shape}: {fault}; nothing was "
            "committed: save again, every rank with the same state"
        )

    def _owned(self, ranks: dict[str, tuple[tuple[int, int], ...]]) -> Iterator[SortedRecords]:
        """Yield the values of each path, and note the ranks that have one."""
        for records in self._values.sorted():
            there = records.spans.lo[0]
            if (there[1:] == there[:-1]).any():
                raise CorruptError(
                    f"{self._origin}: two writers have a value {records.name} of one rank; nothing "
                    "was committed: save again"
                )
            starts = np.flatnonzero(np.diff(there, prepend=there[0] - 2) != 1)
            ends = [*starts[1:].tolist(), len(there)]
            ranks[records.name] = tuple(
                (int(there[start]), int(there[end - 1]) + 1)
                for start, end in zip(starts.tolist(), ends, strict=True)
            )
            yield records

    def _check_borrowed(self) -> None:
        """Refuse bytes of other steps' packs that two chunks claim: no saver writes that."""
        for path, ends in self._borrowed.items():
            spans = np.frombuffer(ends, dtype=np.int64).reshape(-1, 2)
            spans = spans[np.argsort(spans[:, 0], kind="stable")]
            if (shared := np.flatnonzero(spans[1:, 0] < spans[:-1, 1])).size:
                at = int(spans[shared[0] + 1, 0])
                raise CorruptError(
                    f"{self._origin}: two chunks share the bytes at offset {at} of {path}; nothing "
                    "was committed: save again"
                )


def _section(
    file: _RegisterFile, records: Iterable[SortedRecords]
) -> Generator[bytes, None, tuple[ListedBlock, ...]]:
    """Yield the blocks and the pages of a section; return the pages' descriptions."""
    pages: list[ListedBlock] = []
    blocks: list[ListedBlock] = []

    def page() -> bytes:
        place, data = file.block(msgspec.json.encode(blocks))
        pages.append(_listed(place, *around(blocks)))
        blocks.clear()
        return data

    for (first, last, (low, high), body), compressed in _compressed(_bodies(records)):
        place, data = file.block(body, compressed)
        yield data
        blocks.append(_listed(place, first, last, low, high))
        if len(blocks) == PAGE_BLOCKS:
            yield page()
    if blocks:
        yield page()
    return tuple(pages)


def _listed(place: BlockRecord, first: str, last: str, low: Corner, high: Corner) -> ListedBlock:
    return ListedBlock(
        at=place.at,
        stored=place.stored,
        crc32c=place.crc32c,
        nbytes=place.nbytes,
        first=first,
        last=last,
        low=low,
        high=high,
    )


def _compressed(bodies: Iterator[_Body]) -> Iterator[tuple[_Body, bytes]]:
    """Yield blocks with their compressed bytes; threads compress some of them ahead."""

    def work(some: Sequence[_Body]) -> list[tuple[_Body, bytes]]:
        return [(body, codecs.encode(CODEC, body[-1])) for body in some]

    groups = iter(lambda: list(islice(bodies, _TOGETHER)), [])
    return chain.from_iterable(parallel(work, groups, threads=_THREADS))


_Body = tuple[str, str, tuple[Corner, Corner], bytes]


def _bodies(records: Iterable[SortedRecords]) -> Iterator[_Body]:
    """Yield blocks before compression: names with many records apart, others together."""
    pooled: list[SortedRecords] = []
    count = size = 0
    for found in records:
        own = sum(map(len, found.encoded))
        few = len(found.encoded) < _POOLED and own < BLOCK_BYTES
        full = count + len(found.encoded) > BLOCK_RECORDS or size + own > BLOCK_BYTES
        if pooled and (full or not few):
            yield _together(pooled)
            pooled, count, size = [], 0, 0
        if few:
            pooled.append(found)
            count, size = count + len(found.encoded), size + own
            continue
        for start, end in _cuts(found.encoded):
            body = b"[%s]" % _named(found.name, found.encoded[start:end])
            yield found.name, found.name, found.corners(start, end), body
    if pooled:
        yield _together(pooled)


def _together(pooled: Sequence[SortedRecords]) -> _Body:
    first, last = pooled[0], pooled[-1]
    corners: tuple[Corner, Corner] = ((), ())
    if first is last:
        corners = first.corners(0, len(first.encoded))
    body = b",".join(_named(found.name, found.encoded) for found in pooled)
    return first.name, last.name, corners, b"[%s]" % body


def _named(name: str, encoded: Sequence[bytes]) -> bytes:
    return b"[%s,[%s]]" % (msgspec.json.encode(name), b",".join(encoded))


def _cuts(encoded: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the first record of each block, and the one behind its last."""
    ends = np.cumsum([*map(len, encoded)])
    start = size = 0
    while start < len(encoded):
        full = int(np.searchsorted(ends, size + BLOCK_BYTES)) + 1
        end = min(start + BLOCK_RECORDS, full, len(encoded))
        yield start, end
        start, size = end, int(ends[end - 1])
