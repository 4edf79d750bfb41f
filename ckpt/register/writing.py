"""The making of a register from the indexes of all writers, one after the other.

Only what names and tensors need stays in memory: the entries of the chunks pass through
`holdfast.ckpt.register.runs`. All that the union of the indexes must fulfil is checked on the way.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format import codecs
from holdfast.ckpt.format.codecs import Codec
from holdfast.ckpt.format.manifest import (
    ALIGN,
    CRC_BYTES,
    BlockRecord,
    PackedTensor,
    PackIndex,
    TensorRecord,
    WriterRecord,
    path_of,
    stored_bytes,
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
from holdfast.ckpt.register.runs import RUN_BYTES, SortedRecords, SortedRuns
from holdfast.ckpt.types import Json

_POOLED: Final = BLOCK_RECORDS // 2
"""A name with fewer records shares its block with others."""


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

    def block(self, body: bytes) -> tuple[BlockRecord, bytes]:
        """Return a block's record and its bytes, which follow all others."""
        data = codecs.encode(CODEC, body)
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
        self._encode = msgspec.json.Encoder().encode
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

    def add(self, record: WriterRecord, index: PackIndex) -> None:
        """Take one writer."""
        self._writers.add(NO_NAME, (record.writer,), (1,), msgspec.json.encode(record))
        self._check_step(index)
        if index.pack_bytes % ALIGN:
            raise self._unaligned(index)
        self.values |= index.values
        self.aliases |= index.aliases
        for name, tree in index.rank_values.items():
            path, rank = owner_of(name, writer=index.writer)
            value = RankValue(rank=rank, writer=index.writer, name=name, tree=tree)
            encoded = msgspec.json.encode(value, order="deterministic")
            self._values.add(path, (rank,), (1,), encoded)
        self._add_chunks(index)

    def _add_chunks(self, index: PackIndex) -> None:
        writer, encode, take = index.writer, self._encode, self._chunks.add
        for fqn, tensor in index.tensors.items():
            self._agree(fqn, tensor, writer)
            self.chunks += len(tensor.chunks)
            for chunk in tensor.chunks:
                box = chunk.box
                take(fqn, box.offset, box.shape, encode(listed_of(writer, chunk, tensor.cell)))
                if chunk.base is not None:
                    ends = chunk.at, chunk.at + stored_bytes(chunk, tensor) + CRC_BYTES
                    self._borrowed.setdefault(path_of(chunk, index), array("q")).extend(ends)
                elif chunk.at % ALIGN:
                    raise self._unaligned(index)

    def _agree(self, fqn: str, tensor: PackedTensor, writer: int) -> None:
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
        if tensor.chunks:
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

    for first, last, (low, high), body in _bodies(records):
        place, data = file.block(body)
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
    start = size = 0
    for number, each in enumerate(encoded):
        size += len(each)
        if number + 1 - start == BLOCK_RECORDS or size >= BLOCK_BYTES:
            yield start, number + 1
            start, size = number + 1, 0
    if start < len(encoded):
        yield start, len(encoded)
