"""The manifest of a checkpoint and the index of each pack. Pure.

Both are JSON in an envelope (`format.sealed`). Paths are relative to the step's directory.
docs/reference/format.md describes the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from operator import add, gt
from typing import Final

import msgspec

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format.codecs import MAX_RATIO, Codec
from holdfast.ckpt.format.sealed import seal, unseal
from holdfast.ckpt.format.wellformed import fault_of_aliases, fault_of_shape, fault_of_values
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.native.crc import BLOCK_BYTES
from holdfast.ckpt.types import Json, learn

FORMAT: Final = 2
"""Version of the files this code writes."""

REGISTER_FORMAT: Final = 3
"""Version of a manifest whose writers and chunks a register lists (`holdfast.ckpt.register`)."""

READ_FORMATS: Final = (1, FORMAT)
"""Versions of the indexes and notes this code reads; of manifests also `REGISTER_FORMAT`."""

MANIFEST: Final = "manifest.json"
REFS: Final = "refs.json"
REGISTER_ENDING: Final = ".register"
RETAINED: Final = "retained.json"
"""Marks the folder of a removed step: lists the files to remove once no other step needs them."""

CRC_BYTES: Final = 4
"""Behind each stored chunk lies the CRC32C of its stored bytes, little-endian, as Zarr requires."""

ALIGN: Final = 64
"""Chunks start at multiples of this."""

_KNOWN_INDEXES: Final = 16
_KNOWN_BYTES: Final = 128 << 10
"""Indexes up to this size are remembered: together they take some megabytes."""

MERGED: Final = -1
"""The writer number of the committer's own pack."""

_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._-]*"
_PACK_PATH: Final = re.compile(f"data/{_NAME}")
_REFS_PATH: Final = re.compile(re.escape(REFS))
_INDEX_PATH: Final = re.compile(f"index/{_NAME}")
_REGISTER_PATH: Final = re.compile(f"index/{_NAME}{re.escape(REGISTER_ENDING)}")
_BASE_PATH: Final = re.compile(rf"\.\./step-([0-9]{{12}})/data/{_NAME}")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the checkpoint: its path in the step's directory, its size and checksum."""

    path: str
    nbytes: int
    crc32c: int


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A compressed part of a register: ``stored`` bytes at ``at`` with their CRC32C.

    ``nbytes`` is the size before compression.
    """

    at: int
    stored: int
    crc32c: int
    nbytes: int


class RegisterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The register of a step: its file, the block to begin with, and the number of its chunks."""

    file: FileRecord
    root: BlockRecord
    chunks: int


class PackedChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A box of a tensor in a pack: C-order little-endian elements at ``at``.

    ``crc32c`` and ``crc64`` cover the box's own ``nbytes`` bytes; ``blocks`` has the CRC32C of each
    `holdfast.ckpt.native.crc.BLOCK_BYTES` of them, where there is more than one block and no codec.
    ``padded`` chunks are stored with the shape of the tensor's ``cell``: the box in its low corner,
    zeros elsewhere. ``stored`` is the size after compression. ``base`` is the number of another
    step's pack (`PackIndex.bases`) that holds the chunk; None means the writer's own pack.
    """

    box: Box
    at: int
    nbytes: int
    crc32c: int
    padded: bool = False
    stored: int | None = None
    crc64: int | None = None
    blocks: bytes = b""
    base: int | None = None


class PackedTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A tensor's part in one pack; ``cell`` is None where the writer knew of no regular grid."""

    dtype: str
    shape: tuple[int, ...]
    cell: tuple[int, ...] | None
    chunks: tuple[PackedChunk, ...]
    codec: Codec | None = None


class PackIndex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The chunks of one writer: stored in its ``pack``, or found unchanged in ``bases``.

    ``bases`` are packs of other steps. ``values`` are global; no two writers have the same key.
    """

    format: int
    run: str
    step: int
    generation: int
    writer: int
    world_size: int
    pack: str
    pack_bytes: int
    tensors: dict[str, PackedTensor]
    bases: tuple[FileRecord, ...] = ()
    values: dict[str, Json] = {}
    rank_values: dict[str, Json] = {}
    aliases: dict[str, str] = {}


class BaseStep(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier step, by the SHA-256 of its manifest, that holds unchanged chunks."""

    step: int
    digest: str


class WriterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The two files of one writer, and the packs of other steps that its index refers to.

    ``base`` is the step with which it was compared; the packs may be of that step or of older ones.
    """

    writer: int
    pack: FileRecord
    index: FileRecord
    bases: tuple[FileRecord, ...] = ()
    base: BaseStep | None = None


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor: torch's dtype name, global shape, the cell of its Zarr chunk grid, its codec."""

    dtype: str
    shape: tuple[int, ...]
    cell: tuple[int, ...]
    codec: Codec | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checkpoint. ``merged`` holds the grid cells that no writer had in one piece, if any.

    ``merged`` repeats bytes of the writers' packs, for readers of the Zarr view. With a
    ``register`` there are neither ``merged`` nor ``refs``, and the file lists no ``writers``: they
    are those that the register lists, or none where it was not read (`with_writers`).
    """

    format: int
    run: str
    step: int
    generation: int
    world_size: int
    mesh: dict[str, int]
    tensors: dict[str, TensorRecord]
    values: dict[str, Json]
    aliases: dict[str, str]
    writers: tuple[WriterRecord, ...]
    merged: WriterRecord | None
    refs: FileRecord | None
    created_by: dict[str, str]
    register: RegisterRecord | None = None

    def records(self) -> tuple[WriterRecord, ...]:
        """Return the writers' files, then those of the merged cells."""
        return (*self.writers, *((self.merged,) if self.merged else ()))

    def files(self) -> Iterator[FileRecord]:
        """Yield every file of the step's own folder, the manifest itself excepted."""
        for record in self.records():
            yield record.pack
            yield record.index
        if self.refs is not None:
            yield self.refs
        if self.register is not None:
            yield self.register.file

    def bases(self) -> dict[str, FileRecord]:
        """Return the packs of other steps that this one needs, by path."""
        return {base.path: base for record in self.records() for base in record.bases}


def read_manifest(data: bytes, *, origin: str) -> Manifest:
    """Parse and check a manifest. Raises ``CorruptError`` naming ``origin`` and the fault."""
    formats = (*READ_FORMATS, REGISTER_FORMAT)
    manifest = unseal(data, Manifest, origin=origin, formats=formats)
    if fault := next(_faults_of_manifest(manifest), None):
        raise CorruptError(f"{origin}: {fault}; load another step")
    for fqn, tensor in manifest.tensors.items():
        itemsize = dtype_of(tensor.dtype, origin=f"{origin}: tensor {fqn}").itemsize
        if fault := fault_of_shape(tensor.shape, tensor.cell, itemsize=itemsize):
            raise CorruptError(f"{origin}: tensor {fqn}: {fault}")
    return manifest


def with_writers(manifest: Manifest, writers: Sequence[WriterRecord], *, origin: str) -> Manifest:
    """Return a manifest with the writers that its register lists, after checking them."""
    whole = msgspec.structs.replace(manifest, writers=tuple(writers))
    if fault := next(_faults_of_records(whole), None):
        raise CorruptError(f"{origin}: {fault}; load another step")
    return whole


def _faults_of_manifest(manifest: Manifest) -> Iterator[str]:
    if manifest.format == REGISTER_FORMAT:
        yield from _faults_of_register(manifest)
    else:
        if manifest.register is not None or manifest.refs is None:
            yield f"format {manifest.format} has no register, and a reference map"
        yield from _faults_of_records(manifest)
    if fault := fault_of_aliases(manifest.tensors, manifest.aliases):
        yield fault
    if fault := fault_of_values(manifest.values):
        yield fault


def _faults_of_register(manifest: Manifest) -> Iterator[str]:
    register = manifest.register
    if register is None or manifest.writers or manifest.merged or manifest.refs:
        yield f"format {manifest.format} needs a register, and it alone lists the files"
        return
    yield from _faults_of_file(register.file, _REGISTER_PATH)
    root = register.root
    if not 0 <= root.at <= root.at + root.stored <= register.file.nbytes or root.nbytes < 0:
        yield f"{register.file.path}: has no {root.stored} bytes at {root.at}"
    if manifest.world_size < 1:
        yield f"has {manifest.world_size} writers"


def _faults_of_records(manifest: Manifest) -> Iterator[str]:
    found = [record.writer for record in manifest.writers]
    if not found or len(found) != manifest.world_size or found != list(range(len(found))):
        yield f"lists writers {found[:20]}, needs each of 0 … {manifest.world_size - 1} once"
    if manifest.merged is not None and manifest.merged.writer != MERGED:
        yield f"merged: is of writer {manifest.merged.writer}, not {MERGED}"
    for record in manifest.records():
        yield from _faults_of_file(record.pack, _PACK_PATH)
        yield from _faults_of_file(record.index, _INDEX_PATH)
        yield from _faults_of_bases(record.bases, step=manifest.step)
    if manifest.refs is not None:
        yield from _faults_of_file(manifest.refs, _REFS_PATH)
    paths = [file.path for file in manifest.files()]
    if len(set(paths)) != len(paths):
        yield "one file is listed twice"
    sizes = {base for record in manifest.records() for base in record.bases}
    if len(sizes) != len(manifest.bases()):
        yield "a pack of another step is listed with two sizes"


def _faults_of_file(record: FileRecord, proper: re.Pattern[str]) -> Iterator[str]:
    if not proper.fullmatch(record.path):
        yield f"{record.path!r} is not a path inside a checkpoint"
    if record.nbytes < 0 or not 0 <= record.crc32c < 1 << 32:
        yield f"{record.path}: cannot have {record.nbytes} bytes with checksum {record.crc32c}"


def _faults_of_bases(bases: Sequence[FileRecord], *, step: int) -> Iterator[str]:
    for base in bases:
        match = _BASE_PATH.fullmatch(base.path)
        if match is None or int(match[1]) == step:
            yield f"{base.path!r} is not a pack of another step"
        else:
            yield from _faults_of_file(base, _BASE_PATH)
    if len({base.path for base in bases}) != len(bases):
        yield "a pack of another step is listed twice by one writer"


def read_index(data: bytes, *, origin: str) -> PackIndex:
    """Parse and check the index of a pack, which the caller leaves as it is.

    A few small ones are remembered by all their bytes: a load reads them twice, and so do ranks
    that are threads or take turns. Raises ``CorruptError`` naming ``origin``.
    """
    return (_known_index if len(data) <= _KNOWN_BYTES else _parsed_index)(data, origin)


def _parsed_index(data: bytes, origin: str) -> PackIndex:
    index = unseal(data, PackIndex, origin=origin, formats=READ_FORMATS)
    if fault := next(faults_of_index(index), None):
        raise CorruptError(f"{origin}: {fault}; load another step")
    sizes: dict[str, int] = {}
    for fqn, tensor in index.tensors.items():
        itemsize = sizes.get(tensor.dtype, 0)
        if not itemsize:
            itemsize = dtype_of(tensor.dtype, origin=f"{origin}: tensor {fqn}").itemsize
            sizes[tensor.dtype] = itemsize
        if fault := fault_of_shape(tensor.shape, tensor.cell, itemsize=itemsize):
            raise CorruptError(f"{origin}: tensor {fqn}: {fault}")
        for chunk in tensor.chunks:
            if fault := fault_of_chunk(chunk, tensor, itemsize, index):
                raise CorruptError(f"{origin}: tensor {fqn}: chunk {chunk.box}: {fault}")
    _check_order(index, origin)
    return index


_known_index = lru_cache(_KNOWN_INDEXES)(_parsed_index)


def faults_of_index(index: PackIndex) -> Iterator[str]:
    if not _PACK_PATH.fullmatch(index.pack):
        yield f"{index.pack!r} is not a path inside a checkpoint"
    yield from _faults_of_bases(index.bases, step=index.step)
    for values in (index.values, index.rank_values):
        if fault := fault_of_values(values):
            yield fault


def is_index_of(index: PackIndex, record: WriterRecord) -> bool:
    """Say whether an index is that of a writer, and of the pack that its record names."""
    found = (index.writer, index.pack, index.pack_bytes, index.bases)
    return found == (record.writer, record.pack.path, record.pack.nbytes, record.bases)


def _check_order(index: PackIndex, origin: str) -> None:
    """Check that the chunks fill the whole pack, with gaps shorter than an alignment."""
    spans = sorted(
        (chunk.at, stored_bytes(chunk, tensor) + CRC_BYTES)
        for tensor in index.tensors.values()
        for chunk in tensor.chunks
        if chunk.base is None
    )
    end = 0
    for at, nbytes in spans:
        if not end <= at < end + ALIGN:
            raise CorruptError(f"{origin}: a chunk at offset {at}, the one before ends at {end}")
        end = at + nbytes
    if not end <= index.pack_bytes < end + ALIGN:
        raise CorruptError(f"{origin}: chunks end at {end}, the pack at {index.pack_bytes}")


def fault_of_chunk(
    chunk: PackedChunk, tensor: PackedTensor, itemsize: int, index: PackIndex
) -> str | None:
    """Return the fault of what an index says of one chunk, if any."""
    box, base, stored = chunk.box, chunk.base, chunk.stored
    if len(box.shape) != len(tensor.shape):
        return f"not of the tensor's rank {len(tensor.shape)}"
    if not (size := prod(box.shape)):
        return "empty"
    if any(map(gt, map(add, box.offset, box.shape), tensor.shape)):
        return f"not a part of the tensor's shape {tensor.shape}"
    if chunk.nbytes != size * itemsize:
        return f"{chunk.nbytes} bytes, its box has {size * itemsize}"
    if not 0 <= chunk.crc32c < 1 << 32 or not 0 <= (chunk.crc64 or 0) < 1 << 64:
        return f"cannot have the checksums {chunk.crc32c} and {chunk.crc64}"
    if chunk.padded and (tensor.cell is None or not _low_corner(box, tensor.cell)):
        return f"padded, but not a part of the cell {tensor.cell}"
    if chunk.blocks and len(chunk.blocks) != 4 * -(-chunk.nbytes // BLOCK_BYTES):
        return f"{len(chunk.blocks)} bytes of block checksums for {chunk.nbytes} bytes"
    if (stored is None) != (tensor.codec is None):
        return "has a compressed size without a codec, or the reverse"
    if stored is not None and chunk.blocks:
        return "has block checksums with a codec"
    if stored is not None and not 0 < padded_bytes(chunk, tensor) <= stored * MAX_RATIO:
        return (
            f"{stored} bytes cannot be the compressed form of {padded_bytes(chunk, tensor)} bytes"
        )
    if base is not None and not 0 <= base < len(index.bases):
        return f"lies in base {base} of {len(index.bases)}"
    limit = index.pack_bytes if base is None else index.bases[base].nbytes
    if chunk.at < 0 or chunk.at + stored_bytes(chunk, tensor) + CRC_BYTES > limit:
        return f"ends behind the pack's {limit} bytes"
    return None


def _low_corner(box: Box, cell: tuple[int, ...]) -> bool:
    return all(n <= c for n, c in zip(box.shape, cell, strict=True))


def stored_bytes(chunk: PackedChunk, tensor: PackedTensor) -> int:
    """Return the size of a chunk as stored, padded or compressed, without its checksum."""
    if chunk.stored is not None:
        return chunk.stored
    return padded_bytes(chunk, tensor) if chunk.padded else chunk.nbytes


def padded_bytes(chunk: PackedChunk, tensor: PackedTensor) -> int:
    """Return the size of a chunk with its padding, before any codec."""
    if not chunk.padded:
        return chunk.nbytes
    return chunk.nbytes // chunk.box.size * prod(tensor.cell or ())


def path_of(chunk: PackedChunk, index: PackIndex) -> str:
    """Return the path of the pack that holds a chunk, relative to the step's folder."""
    return index.pack if chunk.base is None else index.bases[chunk.base].path


def files_of(index: PackIndex) -> list[FileRecord]:
    """Return the packs that hold an index's chunks; the writer's own without its checksum."""
    own = FileRecord(path=index.pack, nbytes=index.pack_bytes, crc32c=0)
    used = {c.base for tensor in index.tensors.values() for c in tensor.chunks}
    return [own if base is None else index.bases[base] for base in used]


def from_root(folder: str, path: str) -> str:
    """Return the name below the root of ``path``, which is relative to a step's ``folder``."""
    return path.removeprefix("../") if path.startswith("../") else f"{folder}/{path}"


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a step that was removed, by path."""

    format: int
    files: tuple[str, ...]


def seal_note(files: Sequence[str]) -> bytes:
    """Return the bytes of a removed step's `RETAINED`: the files that may go once not needed."""
    return seal(_Note(format=FORMAT, files=tuple(files)))


def read_note(data: bytes, *, origin: str) -> list[str]:
    """Parse and check bytes that `seal_note` made. Raises ``CorruptError`` naming ``origin``."""
    note = unseal(data, _Note, origin=origin, formats=READ_FORMATS)
    for path in note.files:
        if not any(kind.fullmatch(path) for kind in (_PACK_PATH, _INDEX_PATH, _REFS_PATH)):
            raise CorruptError(f"{origin}: {path!r} is not a path inside a checkpoint")
    return list(note.files)


learn(globals())
