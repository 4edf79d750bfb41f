"""A block: payload, padding to 8 bytes, index JSON; how it is laid out and verified. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ckpt.errors import CorruptError
from ckpt.index import ShardIndex, decode_index
from ckpt.isal import crc32c
from ckpt.sums import Sums, checksums
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A block every byte of which is what was captured: its index, and its sums for later."""

    index: ShardIndex
    sums: Sums


def verify_block(block: memoryview, entry: BlockEntry, *, origin: str) -> ShardIndex:
    """Check every byte of a block and return its index; as `check_block`."""
    return check_block(block, entry, origin=origin).index


def check_block(block: memoryview, entry: BlockEntry, *, origin: str) -> Verified:
    """Check every byte of a block, in one pass, and return its index and sums.

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
    refs = list(index.chunks())
    for ref in refs:
        at, nbytes = ref.chunk.at, ref.chunk.nbytes
        if at < 0 or nbytes < 0 or at + nbytes > entry.payload_bytes:
            raise CorruptError(f"{origin}: {ref.fqn} lies outside the payload; use another copy")
    starts = np.array([ref.chunk.at for ref in refs], dtype=np.int64)
    lengths = np.array([ref.chunk.nbytes for ref in refs], dtype=np.int64)
    sums, found = checksums(block[: block_bytes(entry)], at=starts, nbytes=lengths)
    for ref, checksum in zip(refs, found.tolist(), strict=True):
        if checksum != ref.chunk.crc32c:
            raise CorruptError(f"{origin}: {ref.fqn} fails its checksum; use another copy")
    return Verified(index=index, sums=sums)
