"""Registers of small made-up steps, in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from doubles.memory_store import MemoryFile
from holdfast.ckpt.format.columns import columns_of
from holdfast.ckpt.format.manifest import (
    ALIGN,
    CRC_BYTES,
    FORMAT,
    REGISTER_FORMAT,
    FileRecord,
    Manifest,
    PackedChunk,
    PackedTensor,
    PackIndex,
    RegisterRecord,
    WriterRecord,
)
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.native.crc import BLOCK_BYTES
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.register.reading import Register
from holdfast.ckpt.register.runs import RUN_BYTES
from holdfast.ckpt.register.writing import RegisterBuilder
from holdfast.ckpt.types import Json

Pieces = Mapping[str, tuple[tuple[int, ...], Sequence[tuple[int, Box]]]]
"""Name -> shape of a uint8 tensor, and its boxes, each with the number of its writer."""


def writers_of(
    pieces: Pieces,
    *,
    world_size: int,
    values: Mapping[str, Json] | None = None,
    rank_values: Mapping[int, Mapping[str, Json]] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> list[tuple[WriterRecord, PackIndex]]:
    """Return the records and indexes of all writers; checksums are made up."""
    tensors: list[dict[str, PackedTensor]] = [{} for _ in range(world_size)]
    ends = [0] * world_size
    for fqn, (shape, boxes) in pieces.items():
        chunks: dict[int, list[PackedChunk]] = {}
        for writer, box in boxes:
            chunk = _chunk(box, ends[writer])
            chunks.setdefault(writer, []).append(chunk)
            ends[writer] += -(-(chunk.nbytes + CRC_BYTES) // ALIGN) * ALIGN
        for writer, own in (chunks or {0: []}).items():
            tensors[writer][fqn] = PackedTensor(
                dtype="uint8", shape=shape, cell=None, chunks=tuple(own)
            )
    found = []
    for writer in range(world_size):
        pack = FileRecord(path=f"data/{writer:05d}.pack", nbytes=ends[writer], crc32c=writer)
        index = PackIndex(
            format=FORMAT,
            run="made up",
            step=7,
            generation=2,
            writer=writer,
            world_size=world_size,
            pack=pack.path,
            pack_bytes=pack.nbytes,
            tensors=tensors[writer],
            values=dict(values or {}) if writer == 0 else {},
            rank_values=dict((rank_values or {}).get(writer, {})),
            aliases=dict(aliases or {}) if writer == 0 else {},
        )
        described = FileRecord(path=f"index/{writer:05d}.json", nbytes=1, crc32c=1)
        found.append((WriterRecord(writer=writer, pack=pack, index=described), index))
    return found


def _chunk(box: Box, at: int) -> PackedChunk:
    nbytes = prod(box.shape)
    blocks = -(-nbytes // BLOCK_BYTES)
    sums = b"".join((at + n).to_bytes(4, "little") for n in range(blocks))
    return PackedChunk(
        box=box,
        at=at,
        nbytes=nbytes,
        crc32c=hash((box, at)) & 0xFFFFFFFF,
        crc64=hash((at, box)) & 0x7FFFFFFFFFFFFFFF,
        blocks=sums if blocks > 1 else b"",
    )


def built(
    writers: Iterable[tuple[WriterRecord, PackIndex]], *, run_bytes: int = RUN_BYTES
) -> tuple[Manifest, bytes]:
    """Return the manifest and the register of some writers."""
    with RegisterBuilder(origin="a made-up step", run_bytes=run_bytes) as builder:
        for record, index in writers:
            builder.add([record], columns_of([index]))
        data = b"".join(builder.parts())
    assert builder.checksum == crc32c(data)
    manifest = Manifest(
        format=REGISTER_FORMAT,
        run=index.run,
        step=index.step,
        generation=index.generation,
        world_size=index.world_size,
        mesh={},
        tensors=builder.tensors,
        values=builder.values,
        aliases=builder.aliases,
        writers=(),
        merged=None,
        refs=None,
        created_by={},
        register=RegisterRecord(
            file=FileRecord(path="index/x.register", nbytes=len(data), crc32c=crc32c(data)),
            root=builder.root,
            chunks=builder.chunks,
        ),
    )
    return manifest, data


def opened(manifest: Manifest, data: bytes) -> Register:
    """Return the register that ``data`` is."""
    return Register(manifest, lambda: MemoryFile(data), origin="x.register")
