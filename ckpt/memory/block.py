"""The layout of a block (payload, padding to 8 bytes, index JSON) and its verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from typing_extensions import Buffer

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.geometry.shard_index import ShardIndex, decode_index
from holdfast.ckpt.memory.records import BlockEntry, ancestor
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.sums import SUM_BYTES, CheckedBlock, Lengths, Sums, checksums

_SAMPLED_RUNS: Final = 64


class SlotState(IntEnum):
    """The state of a slot; stored in the header."""

    EMPTY = 0
    WRITING = 1
    SEALED = 2
    COMMITTED = 3


def align(nbytes: int, to: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


def index_offset(payload_bytes: int) -> int:
    """Return the offset of the index in a block."""
    return align(payload_bytes, 8)


def block_bytes(entry: BlockEntry) -> int:
    """Return the length of the whole block."""
    return index_offset(entry.payload_bytes) + entry.index_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A block whose every byte is verified: its index, and its sums for later checks."""

    index: ShardIndex
    sums: Sums


def offered_under(index: ShardIndex, generation: int) -> int:
    """Return the generation of a block's index in the numbering of the ``generation`` of its entry.

    The number is negative for a block that an earlier run left on a disk (see
    `holdfast.ckpt.sidecar.disk.directory`).
    """
    return index.generation if generation >= 0 else ancestor(index.run, index.generation)


def verify_block(block: memoryview, entry: BlockEntry, *, origin: str) -> ShardIndex:
    """Check every byte of a block and return its index; see `check_block`."""
    return check_block(block, entry, origin=origin).index


def check_block(block: memoryview, entry: BlockEntry, *, origin: str) -> Verified:
    """Check every byte of a block, in one pass, and return its index and sums.

    ``block`` is payload, padding and index. Raises ``CorruptError`` naming the index or the
    tensor at fault.
    """
    check = BlockCheck(block, entry, origin=origin)
    sums, found = checksums(block[: block_bytes(entry)], at=check.starts, nbytes=check.lengths)
    return check.verified(sums, found)


class BlockCheck:
    """The expected checksums of a block. The constructor checks its index at once.

    Raises ``CorruptError``. ``starts`` and ``lengths`` are the ranges of all chunks, in bytes.
    """

    def __init__(self, block: memoryview, entry: BlockEntry, *, origin: str) -> None:
        self._origin = origin
        text = block[index_offset(entry.payload_bytes) : block_bytes(entry)]
        if crc32c(text) != entry.index_crc32c:
            raise CorruptError(f"{origin}: the index fails its checksum; use another copy")
        self.index = index = decode_index(text, origin=origin)
        generation = offered_under(index, entry.generation)
        found = (generation, index.step, index.writer, index.payload_bytes)
        if found != (entry.generation, entry.step, entry.rank, entry.payload_bytes):
            raise CorruptError(
                f"{origin}: the index is of (generation, step, rank, bytes) {found}, the entry is "
                f"{entry}; use another copy"
            )
        self._refs = list(index.chunks())
        for ref in self._refs:
            at, nbytes = ref.chunk.at, ref.chunk.nbytes
            if at < 0 or nbytes < 0 or at + nbytes > entry.payload_bytes:
                raise CorruptError(
                    f"{origin}: {ref.fqn} lies outside the payload; use another copy"
                )
        self.starts: Lengths = np.array([ref.chunk.at for ref in self._refs], dtype=np.int64)
        self.lengths: Lengths = np.array([ref.chunk.nbytes for ref in self._refs], dtype=np.int64)

    def verified(self, sums: Sums, found: Sums) -> Verified:
        """Compare the checksums of all chunks, in order; ``sums`` are those of the block.

        Raises ``CorruptError`` naming the tensor that differs.
        """
        for ref, checksum in zip(self._refs, found.tolist(), strict=True):
            if checksum != ref.chunk.crc32c:
                raise CorruptError(
                    f"{self._origin}: {ref.fqn} fails its checksum; use another copy"
                )
        return Verified(index=self.index, sums=sums)


def check_sealed(
    block: memoryview,
    entry: BlockEntry,
    data: Buffer,
    *,
    turn: int,
    origin: str,
    fixed: Sums | None = None,
) -> Sums:
    """Check a block by its index and a sample of runs; return the writer's sums.

    ``data`` has four bytes a sum, little-endian. Every 64th run is checked, other ones at each
    ``turn``. ``fixed`` are the sums of the fixed part, where a block with it was sealed before:
    the writer must give the same again. Raises ``CorruptError``.
    """
    nbytes, found = block_bytes(entry), memoryview(data).nbytes
    if found != 4 * -(-nbytes // SUM_BYTES):
        raise CorruptError(
            f"{origin}: {found:,} bytes of checksums came for a block of {nbytes:,}, four for "
            f"every {SUM_BYTES:,} are needed; take another snapshot"
        )
    sums: Sums = np.frombuffer(memoryview(data), dtype="<u4").astype(np.uint32)
    at = index_offset(entry.payload_bytes)
    if crc32c(block[at:nbytes]) != entry.index_crc32c:
        raise CorruptError(f"{origin}: the index fails its checksum; take another snapshot")
    checked = CheckedBlock(block[:nbytes], sums, origin=origin)
    checked.take(at, nbytes - at)
    if fixed is not None and not np.array_equal(sums[: len(fixed)], fixed):
        raise CorruptError(f"{origin}: the fixed part is not what was sealed; take another one")
    for run in range(turn % _SAMPLED_RUNS, len(sums), _SAMPLED_RUNS):
        checked.take(run * SUM_BYTES, min(SUM_BYTES, nbytes - run * SUM_BYTES))
    return sums


def check_since(frames: Sequence[Buffer], entry: BlockEntry, origin: str) -> Lengths | None:
    """Return the steps since which the runs of a block are the same, where the writer gave them.

    Raises ``CorruptError`` unless there is one for every run, none later than the block.
    """
    if not frames:
        return None
    runs, data = -(-block_bytes(entry) // SUM_BYTES), memoryview(frames[0])
    if data.nbytes == 8 * runs:
        found: Lengths = np.frombuffer(data, dtype="<i8").astype(np.int64)
        if int(found.max(initial=0)) <= entry.step:
            return found
    raise CorruptError(
        f"{origin}: {data.nbytes:,} bytes of steps came for {runs:,} runs of step {entry.step}, "
        "eight for each are needed, none later than the step; take another snapshot"
    )
