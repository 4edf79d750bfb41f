"""A block: payload, padding to 8 bytes, index JSON; how it is laid out and verified. Pure."""

from __future__ import annotations

from enum import IntEnum

from ckpt.errors import CorruptError
from ckpt.index import ShardIndex, decode_index
from ckpt.isal import crc32c
from ckpt.world import BlockEntry


class SlotState(IntEnum):
    """Where a slot is in its life; stored in the header."""

    EMPTY = 0
    WRITING = 1
    SEALED = 2
    COMMITTED = 3


def align(nbytes: int, to: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


def index_offset(payload_bytes: int) -> int:
    """Return where in a block the index begins."""
    return align(payload_bytes, 8)


def block_bytes(entry: BlockEntry) -> int:
    """Return the length of the whole block."""
    return index_offset(entry.payload_bytes) + entry.index_bytes


def verify_block(block: memoryview, entry: BlockEntry, *, origin: str) -> ShardIndex:
    """Check every byte of a block and return its index.

    ``block`` is payload, padding and index. Raises ``CorruptError`` naming the index or the
    tensor at fault.
    """
    text = block[index_offset(entry.payload_bytes) : block_bytes(entry)]
    if crc32c(text) != entry.index_crc32c:
        raise CorruptError(f"{origin}: the index fails its checksum; use another copy")
    index = decode_index(text, origin=origin)
    said = (index.generation, index.step, index.writer, index.payload_bytes)
    if said != (entry.generation, entry.step, entry.rank, entry.payload_bytes):
        raise CorruptError(
            f"{origin}: the index is of (generation, step, rank, bytes) {said}, the entry is "
            f"{entry}; use another copy"
        )
    for ref in index.chunks():
        chunk = ref.chunk
        if chunk.at < 0 or chunk.at + chunk.nbytes > entry.payload_bytes:
            raise CorruptError(f"{origin}: {ref.fqn} lies outside the payload; use another copy")
        if crc32c(block[chunk.at : chunk.at + chunk.nbytes]) != chunk.crc32c:
            raise CorruptError(f"{origin}: {ref.fqn} fails its checksum; use another copy")
    return index
