"""The records of a register, and the choice of the blocks that a reader needs. Pure.

A register has three *sections*: the chunks of all writers by tensor, the writers by number, and the
values that belong to one rank by path. Each is a sequence of records, sorted by name and then by
their box: a chunk has its tensor's name and its own box, writer ``n`` the name ``""`` and the box
``n … n + 1``, the value of rank ``r`` the name of its path and the box ``r … r + 1``. So one way to
cut, to describe and to search serves all three.

Records lie in *blocks*, about a hundred in each. Each block is compressed and has a checksum of its
own. The descriptions of a few hundred blocks (`ListedBlock`) are a block as well, a *page*; those
of all pages are in the root, which the manifest describes. So a reader of some names and boxes
reads the root, a few pages and the blocks that meet them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from holdfast.ckpt.format.codecs import Codec
from holdfast.ckpt.format.manifest import BlockRecord, PackedChunk, WriterRecord
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.types import Json, learn

CODEC: Final = Codec(name="zstd", level=3)

BLOCK_RECORDS: Final = 128
"""The most records of a block: a rank wants few of each tensor's."""

BLOCK_BYTES: Final = 128 << 10
"""A block ends once it has this size, before compression; a single record may be larger."""

PAGE_BLOCKS: Final = 256

MOST_BLOCK_BYTES: Final = 1 << 30
"""No block is larger: as no index is."""

Corner: TypeAlias = tuple[int, ...]

Region: TypeAlias = tuple[Corner, Corner]
"""The first corner of a box, and the one behind its last element."""

Want: TypeAlias = Mapping[str, Sequence[Region] | None]
"""Per name the boxes whose records are wanted; None: all of that name."""

_Record = TypeVar("_Record")


class ListedChunk(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """A chunk in the register: `PackedChunk`, with its writer.

    ``cell`` is the shape to which it is padded. ``base`` counts the ``bases`` of the writer.
    """

    writer: int
    offset: Corner
    shape: Corner
    at: int
    nbytes: int
    crc32c: int
    crc64: int | None
    blocks: bytes
    stored: int | None
    cell: Corner | None
    base: int | None

    def packed(self) -> PackedChunk:
        """Return the chunk as its writer's index lists it. Raises ``ValueError`` for no box."""
        return PackedChunk(
            box=Box(offset=self.offset, shape=self.shape),
            at=self.at,
            nbytes=self.nbytes,
            crc32c=self.crc32c,
            padded=self.cell is not None,
            stored=self.stored,
            crc64=self.crc64,
            blocks=self.blocks,
            base=self.base,
        )


def listed_of(
    writers: Iterable[int], chunks: Sequence[PackedChunk], cells: Iterable[Corner | None]
) -> list[tuple[object, ...]]:
    """Return the fields of many `ListedChunk`, to be encoded; ``cells`` are those of padded chunks.

    There are a million of them at once: making no object of each takes a third less time. It is a
    list, since the ``encode_lines`` of msgspec 0.22 never frees the items of an iterator.
    """
    boxes = [chunk.box for chunk in chunks]
    columns = (
        writers,
        [box.offset for box in boxes],
        [box.shape for box in boxes],
        [chunk.at for chunk in chunks],
        [chunk.nbytes for chunk in chunks],
        [chunk.crc32c for chunk in chunks],
        [chunk.crc64 for chunk in chunks],
        [chunk.blocks for chunk in chunks],
        [chunk.stored for chunk in chunks],
        cells,
        [chunk.base for chunk in chunks],
    )
    return list(zip(*columns, strict=True))


class RankValue(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """A value that belongs to one rank: the ``name`` that its writer gave it, and its tree."""

    rank: int
    writer: int
    name: str
    tree: Json


class Named(
    msgspec.Struct, Generic[_Record], frozen=True, array_like=True, forbid_unknown_fields=True
):
    """The records of one name in a block."""

    name: str
    records: tuple[_Record, ...]


class ListedBlock(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """A block, and which records it holds: the first and the last name.

    If these are the same, ``low`` and ``high`` are the corners of a box around its records' boxes.
    """

    at: int
    stored: int
    crc32c: int
    nbytes: int
    first: str
    last: str
    low: Corner
    high: Corner

    @property
    def place(self) -> BlockRecord:
        """Its range in the file."""
        return BlockRecord(at=self.at, stored=self.stored, crc32c=self.crc32c, nbytes=self.nbytes)


class RegisterRoot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The beginning of a register: the pages of each section.

    ``ranks`` has, per path of values that belong to one rank, the ranges of ranks that have one.
    """

    chunks: tuple[ListedBlock, ...]
    writers: tuple[ListedBlock, ...]
    values: tuple[ListedBlock, ...]
    ranks: dict[str, tuple[tuple[int, int], ...]]


NO_NAME: Final = ""
"""The name of all writers' records."""

CHUNKS: Final = msgspec.json.Decoder(tuple[Named[ListedChunk], ...])
WRITERS: Final = msgspec.json.Decoder(tuple[Named[WriterRecord], ...])
VALUES: Final = msgspec.json.Decoder(tuple[Named[RankValue], ...])
PAGE: Final = msgspec.json.Decoder(tuple[ListedBlock, ...])
ROOT: Final = msgspec.json.Decoder(RegisterRoot)


def numbers(wanted: Iterable[int]) -> list[Region]:
    """Return the regions of the records of some writers, or of some ranks; neighbours as one."""
    found: list[Region] = []
    for number in sorted({*wanted}):
        if found and found[-1][1] == (number,):
            found[-1] = found[-1][0], (number + 1,)
        else:
            found.append(((number,), (number + 1,)))
    return found


def region_of(box: Box) -> Region:
    """Return a box as its two corners."""
    return box.offset, tuple(o + n for o, n in zip(box.offset, box.shape, strict=True))


def meet(low: Corner, high: Corner, region: Region) -> bool:
    """Say whether two regions share an element; a region without dims is one element."""
    start, stop = region
    return all(max(a, c) < min(b, d) for a, b, c, d in zip(low, high, start, stop, strict=False))


def around(described: Sequence[ListedBlock]) -> tuple[str, str, Corner, Corner]:
    """Return the names and corners of what several blocks hold together."""
    first, last = described[0].first, described[-1].last
    if first != last:
        return first, last, (), ()
    low = tuple(map(min, zip(*(block.low for block in described), strict=True)))
    high = tuple(map(max, zip(*(block.high for block in described), strict=True)))
    return first, last, low, high


def needed(described: Sequence[ListedBlock], want: Want | None) -> Iterator[ListedBlock]:
    """Yield the blocks that may hold wanted records; None wants all."""
    if want is None:
        yield from described
        return
    names = sorted(want)
    for block in described:
        at = bisect_left(names, block.first)
        if at == len(names) or names[at] > block.last:
            continue
        regions = want[names[at]] if block.first == block.last else None
        if regions is None or any(meet(block.low, block.high, region) for region in regions):
            yield block


def is_wanted(name: str, low: Corner, high: Corner, want: Want | None) -> bool:
    """Say whether a record of this name and box is wanted."""
    if want is None:
        return True
    if name not in want:
        return False
    regions = want[name]
    return regions is None or any(meet(low, high, region) for region in regions)


learn(globals())
