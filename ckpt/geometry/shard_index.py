"""The description of one writer's shard, which travels with its bytes. Pure.

The same value describes a slot of an arena, a block rebuilt from parity and a pack of a checkpoint;
only the container of the payload differs. It is stored as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.types import Json, learn

INDEX_FORMAT = 1


class Chunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One box of a tensor: C-order little-endian elements at ``at`` (bytes) in the payload."""

    box: Box
    at: int
    nbytes: int
    crc32c: int


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tensor: torch dtype name, global shape, and the chunks this writer holds of it.

    ``grid`` is the shape of a cell when the boxes of *all* writers are the cells of one regular
    grid (ragged at the tensor's edges only), as after an even or uneven split along any dim: the
    largest extent per dim. None means unknown; see ``holdfast.ckpt.geometry.grid.common_grid``.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    grid: tuple[int, ...] | None = None


class ShardIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The description of all that one writer (rank) holds of one step.

    ``values`` are plain global values, each written by the lowest rank that has it; ``rank_values``
    belong to this writer; ``aliases`` maps the FQN of a tied tensor to the FQN under which it is
    stored. Keys of all three are dotted paths in the name space of ``tensors``.
    """

    format: int = INDEX_FORMAT
    run: str
    generation: int
    step: int
    writer: int
    world_size: int
    payload_bytes: int
    tensors: dict[str, TensorEntry]
    values: dict[str, Json] = {}
    rank_values: dict[str, Json] = {}
    aliases: dict[str, str] = {}

    def chunks(self) -> Iterator[ChunkRef]:
        """Yield a reference to every chunk, in payload order of insertion."""
        for fqn, entry in self.tensors.items():
            for chunk in entry.chunks:
                yield ChunkRef(writer=self.writer, fqn=fqn, dtype=entry.dtype, chunk=chunk)


class ChunkRef(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A chunk with its writer, and the name and dtype of its tensor."""

    writer: int
    fqn: str
    dtype: str
    chunk: Chunk


def owner_of(name: str, *, writer: int) -> tuple[str, int]:
    """Return the path and the rank of a value among the ``rank_values`` of ``writer``."""
    path, at, rank = name.rpartition("@")
    return (path, int(rank)) if at and rank.isdecimal() else (name, writer)


def encode_index(index: ShardIndex) -> bytes:
    """Return the JSON of ``index``."""
    return msgspec.json.encode(index)


def decode_index(data: bytes | memoryview, *, origin: str) -> ShardIndex:
    """Parse the JSON that ``encode_index`` wrote.

    Raises ``CorruptError`` naming ``origin`` (a file or slot) and the field at fault.
    """
    try:
        index = msgspec.json.decode(data, type=ShardIndex)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"{origin}: not a shard index: {error}") from error
    if index.format != INDEX_FORMAT:
        raise CorruptError(
            f"{origin}: shard index format {index.format}, this version reads {INDEX_FORMAT}; "
            "install the Holdfast version that wrote it"
        )
    return index


learn(globals())
