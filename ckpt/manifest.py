"""What a checkpoint says of itself: the manifest and the index of each pack. Pure.

Both are JSON in an *envelope*, ``{"crc32c":"…","body":…}``, whose checksum covers the body's
bytes. Paths are relative to the step's directory. docs/format.md describes the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Final, TypeVar

import msgspec

from ckpt.errors import CorruptError
from ckpt.grid import whole
from ckpt.isal import crc32c
from ckpt.layout import Box
from ckpt.types import Json, learn
from ckpt.zarr_dtypes import dtype_of

FORMAT: Final = 1
"""Version of the files this code writes; it reads this one only."""

MANIFEST: Final = "manifest.json"
REFS: Final = "refs.json"

CRC_BYTES: Final = 4
"""Behind every stored chunk lies the CRC32C of its stored bytes, little-endian, as Zarr wants."""

ALIGN: Final = 64
"""Chunks start at multiples of this."""

_HEAD: Final = b'{"crc32c":"%08x","body":'
_HEAD_BYTES: Final = len(_HEAD % 0)
_TAIL: Final = b"}\n"
_PATH: Final = re.compile(r"(data|index)/[A-Za-z0-9][A-Za-z0-9._-]*|refs\.json")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the checkpoint: its path in the step's directory, its size and checksum."""

    path: str
    nbytes: int
    crc32c: int


class PackedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A box of a tensor in a pack: C-order little-endian elements at ``at``.

    ``crc32c`` is that of the box's own ``nbytes`` bytes. ``padded`` chunks are stored with the
    shape of the tensor's ``cell``, the box in its low corner, zeros elsewhere.
    """

    box: Box
    at: int
    nbytes: int
    crc32c: int
    padded: bool = False


class PackedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor's part in one pack; ``cell`` is None where the writer knew of no regular grid."""

    dtype: str
    shape: tuple[int, ...]
    cell: tuple[int, ...] | None
    chunks: tuple[PackedChunk, ...]


class PackIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What one writer put where. ``values`` are global and come from writer 0 only."""

    format: int = FORMAT
    run: str
    step: int
    generation: int
    writer: int
    world_size: int
    pack: str
    pack_bytes: int
    tensors: dict[str, PackedTensor]
    values: dict[str, Json] = {}
    rank_values: dict[str, Json] = {}
    aliases: dict[str, str] = {}


class WriterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The two files of one writer."""

    writer: int
    pack: FileRecord
    index: FileRecord


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor: torch's dtype name, global shape, and the cell of its Zarr chunk grid."""

    dtype: str
    shape: tuple[int, ...]
    cell: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint. ``merged`` holds the grid cells that no writer had in one piece, if any.

    What ``merged`` holds repeats bytes of the writers' packs, for readers of the Zarr view.
    """

    format: int = FORMAT
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
    refs: FileRecord
    created_by: dict[str, str]

    def files(self) -> Iterator[FileRecord]:
        """Yield every file that belongs to the checkpoint, the manifest itself excepted."""
        for record in (*self.writers, *((self.merged,) if self.merged else ())):
            yield record.pack
            yield record.index
        yield self.refs


class _Version(msgspec.Struct):
    format: int


_Record = TypeVar("_Record", Manifest, PackIndex)


def seal(record: Manifest | PackIndex) -> bytes:
    """Return the file's bytes for ``record``: its JSON in an envelope with its checksum."""
    body = msgspec.json.encode(record, order="deterministic")
    return b"".join((_HEAD % crc32c(body), body, _TAIL))


def _unseal(data: bytes, kind: type[_Record], origin: str) -> _Record:
    body = data[_HEAD_BYTES : -len(_TAIL)]
    if data != b"".join((_HEAD % crc32c(body), body, _TAIL)):
        raise CorruptError(
            f"{origin}: its checksum does not match its {len(data)} bytes: the file was changed or "
            "cut off; load another step, or restore the file from a copy"
        )
    try:
        version = msgspec.json.decode(body, type=_Version).format
        if version == FORMAT:
            return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise CorruptError(
            f"{origin}: not a {kind.__name__}: {error}; load another step"
        ) from error
    raise CorruptError(
        f"{origin}: format {version}, this version reads {FORMAT}; install the Holdfast version "
        "that wrote it"
    )


def read_manifest(data: bytes, *, origin: str) -> Manifest:
    """Parse and check a manifest. Raises ``CorruptError`` naming ``origin`` and the fault."""
    manifest = _unseal(data, Manifest, origin)
    for record in manifest.files():
        if not _PATH.fullmatch(record.path):
            raise CorruptError(f"{origin}: {record.path!r} is not a path inside a checkpoint")
    if [record.writer for record in manifest.writers] != list(range(manifest.world_size)):
        raise CorruptError(
            f"{origin}: lists writers {[r.writer for r in manifest.writers]}, needs each of "
            f"0 … {manifest.world_size - 1} once"
        )
    for fqn, tensor in manifest.tensors.items():
        dtype_of(tensor.dtype, origin=f"{origin}: tensor {fqn}")
    return manifest


def read_index(data: bytes, *, origin: str) -> PackIndex:
    """Parse and check the index of a pack. Raises ``CorruptError`` naming ``origin``."""
    index = _unseal(data, PackIndex, origin)
    if not _PATH.fullmatch(index.pack):
        raise CorruptError(f"{origin}: {index.pack!r} is not a path inside a checkpoint")
    for fqn, tensor in index.tensors.items():
        itemsize = dtype_of(tensor.dtype, origin=f"{origin}: tensor {fqn}").itemsize
        for chunk in tensor.chunks:
            if fault := _fault_of(chunk, tensor, itemsize, index.pack_bytes):
                raise CorruptError(f"{origin}: tensor {fqn}: chunk {chunk.box}: {fault}")
    _check_order(index, origin)
    return index


def _check_order(index: PackIndex, origin: str) -> None:
    """Check that the chunks are the whole pack, but for less than an alignment between them."""
    spans = sorted(
        (chunk.at, stored_bytes(chunk, tensor) + CRC_BYTES)
        for tensor in index.tensors.values()
        for chunk in tensor.chunks
    )
    end = 0
    for at, nbytes in spans:
        if not end <= at < end + ALIGN:
            raise CorruptError(f"{origin}: a chunk at offset {at}, the one before ends at {end}")
        end = at + nbytes
    if not end <= index.pack_bytes < end + ALIGN:
        raise CorruptError(f"{origin}: chunks end at {end}, the pack at {index.pack_bytes}")


def _fault_of(chunk: PackedChunk, tensor: PackedTensor, itemsize: int, limit: int) -> str | None:
    if len(chunk.box.shape) != len(tensor.shape):
        return f"not of the tensor's rank {len(tensor.shape)}"
    if chunk.box.intersect(whole(tensor.shape)) != chunk.box:
        return f"not a part of the tensor's shape {tensor.shape}"
    if chunk.nbytes != chunk.box.size * itemsize:
        return f"{chunk.nbytes} bytes, its box has {chunk.box.size * itemsize}"
    if chunk.padded and tensor.cell is None:
        return "padded, but the tensor names no cell"
    if chunk.at < 0 or chunk.at + stored_bytes(chunk, tensor) + CRC_BYTES > limit:
        return f"ends behind the pack's {limit} bytes"
    return None


def stored_bytes(chunk: PackedChunk, tensor: PackedTensor) -> int:
    """Return the size of a chunk as stored, with padding, without the checksum behind it."""
    if not chunk.padded:
        return chunk.nbytes
    return chunk.nbytes // chunk.box.size * prod(tensor.cell or ())


learn(globals())
