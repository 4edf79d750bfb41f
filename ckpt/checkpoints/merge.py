"""Cells that the committer adds so that every Zarr chunk exists in one piece.

If the savers' boxes are the cells of a regular grid, their packs hold every Zarr chunk already,
edges padded. Other layouts (flat ranges, unequal boxes) leave cells that no saver had whole. Those
are assembled and stored once more, in a pack of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from holdfast.ckpt.checkpoints.assemble import Assembler, TensorChunks
from holdfast.ckpt.checkpoints.source import PackSource
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format import pack
from holdfast.ckpt.format.codecs import Codec, spellings
from holdfast.ckpt.format.manifest import MERGED, PackIndex, TensorRecord, WriterRecord
from holdfast.ckpt.format.zarr_metadata import is_stored_cell
from holdfast.ckpt.geometry.grid import cells, chunk_cell, fault_of_cover, whole
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.shard_index import Chunk, ShardIndex, TensorEntry
from holdfast.ckpt.store.base import Store


def describe(
    packs: Iterable[PackIndex], parts: Mapping[str, TensorChunks]
) -> dict[str, TensorRecord]:
    """Return every tensor's record, with the cells of its Zarr array."""
    agreed: dict[str, set[tuple[int, ...] | None]] = {fqn: set() for fqn in parts}
    codecs: dict[str, set[Codec | None]] = {fqn: set() for fqn in parts}
    for index in packs:
        for fqn, tensor in index.tensors.items():
            if tensor.chunks:
                agreed[fqn].add(tensor.cell)
                codecs[fqn].add(tensor.codec)
    return {
        fqn: TensorRecord(
            dtype=part.dtype.name,
            shape=part.shape,
            cell=chunk_cell(
                part.shape,
                [ref.chunk.box for ref in part.chunks],
                agreed[fqn],
                part.dtype.itemsize,
            ),
            codec=_codec(fqn, codecs[fqn]),
        )
        for fqn, part in parts.items()
    }


def _codec(fqn: str, found: set[Codec | None]) -> Codec | None:
    if len(found) > 1:
        raise CorruptError(
            f"tensor {fqn}: its writers compressed it in different ways ({spellings([*found])}); "
            "nothing was committed: save again, every rank with the same compression"
        )
    return next(iter(found), None)


def check_cover(parts: Mapping[str, TensorChunks], *, origin: str) -> None:
    """Raise ``CorruptError`` unless the chunks hold every tensor exactly once."""
    for fqn, part in parts.items():
        if fault := fault_of_cover(part.shape, [ref.chunk.box for ref in part.chunks]):
            raise CorruptError(
                f"{origin}: tensor {fqn} of shape {part.shape}: {fault}; nothing was committed: "
                "save again, every rank with the same state"
            )


def merge(
    store: Store,
    folder: str,
    source: PackSource,
    tensors: Mapping[str, TensorRecord],
    *,
    like: ShardIndex,
    stem: str,
) -> WriterRecord | None:
    """Store the cells that no pack has in one piece; None when there are none."""
    entries = {}
    for fqn, missing in _missing(source.packs.values(), tensors).items():
        record = tensors[fqn]
        chunks = tuple(Chunk(box=box, at=0, nbytes=0, crc32c=0) for box in missing)
        entries[fqn] = TensorEntry(
            dtype=record.dtype, shape=record.shape, chunks=chunks, grid=record.cell
        )
    if not entries:
        return None
    index = ShardIndex(
        run=like.run,
        generation=like.generation,
        step=like.step,
        writer=MERGED,
        world_size=like.world_size,
        payload_bytes=0,
        tensors=entries,
    )
    assembler = Assembler(source)
    writer = pack.PackWriter(
        index,
        lambda ref: assembler.bytes(ref.fqn, ref.chunk.box),
        verify=False,
        codecs={fqn: record.codec for fqn, record in tensors.items()},
    )
    return pack.write(store, writer, index, folder=folder, stem=stem)


def _missing(
    packs: Iterable[PackIndex], tensors: Mapping[str, TensorRecord]
) -> dict[str, list[Box]]:
    stored: dict[str, set[tuple[int, ...]]] = {fqn: set() for fqn in tensors}
    for index in packs:
        for fqn, tensor in index.tensors.items():
            cell = tensors[fqn].cell
            stored[fqn].update(
                chunk.box.offset for chunk in tensor.chunks if is_stored_cell(chunk, tensor, cell)
            )
    incomplete = {
        fqn: record
        for fqn, record in tensors.items()
        if len(stored[fqn])
        < prod(-(-n // c) for n, c in zip(record.shape, record.cell, strict=True))
    }
    return {
        fqn: [
            box for box in cells(whole(record.shape), record.cell) if box.offset not in stored[fqn]
        ]
        for fqn, record in incomplete.items()
    }
