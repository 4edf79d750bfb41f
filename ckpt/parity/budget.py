"""The host memory that a node needs for its snapshots and their parity, in advance. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.ckpt.memory.block import align
from holdfast.ckpt.memory.records import BlockEntry, SnapshotWorld
from holdfast.ckpt.parity.stripes import Geometry

SMALL_IN_FLIGHT = 1
"""Slots of a rank besides the kept ones: the one being written.

It may have to wait until the step before it is protected.
"""
FULL_IN_FLIGHT = 2
"""The same with the slot that is lent to a rank whose training would wait."""

LOG_BYTES = 1 << 30
"""The most that all logs of a node may hold, copies for others included."""
LOG_SHARE = 8
"""Logs may hold 1 / ``LOG_SHARE`` of a declared budget."""

_HEADER_BYTES = 4096
_GRAIN_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of shared memory by purpose, file headers included.

    ``lent`` is needed beside the others while snapshots come faster than they are protected.
    """

    slots: int
    parity: int
    lent: int = 0

    @property
    def total(self) -> int:
        """Return the sum of slots and parity."""
        return self.slots + self.parity


def log_limit(memory_bytes: int) -> int:
    """Return the most that the logs of a node may hold, by its budget (0: none is declared)."""
    return min(LOG_BYTES, memory_bytes // LOG_SHARE) if memory_bytes else LOG_BYTES


def memory_need(
    world: SnapshotWorld,
    shard_bytes: Mapping[int, int],
    *,
    node: str,
    slots_per_rank: int,
    fixed_bytes: Mapping[int, int] | None = None,
) -> MemoryNeed:
    """Return the most bytes that ``node`` will hold at once.

    ``shard_bytes`` maps ranks to the length of their blocks (payload and index). A rank that is not
    in it is assumed to be as long as the longest in it. ``slots_per_rank`` is ``world.keep`` plus
    `FULL_IN_FLIGHT` or `SMALL_IN_FLIGHT`. Parity may be held or built for as many snapshots as have
    slots: the next one can be complete before the rows of the one before are. A node that is not in
    the world needs nothing. ``fixed_bytes`` maps ranks to the fixed part of their blocks, which all
    slots share, as rows share its parity.
    """
    if node not in {peer.node for peer in world.peers}:
        return MemoryNeed(slots=0, parity=0)
    fixed_bytes = fixed_bytes or {}
    longest = max(shard_bytes, key=lambda rank: shard_bytes[rank], default=-1)
    ranks = range(len(world.rank_nodes))
    like = {rank: rank if rank in shard_bytes else longest for rank in ranks}
    entries = {
        rank: _entry(world, rank, shard_bytes.get(known, 0), fixed_bytes.get(known, 0))
        for rank, known in like.items()
    }
    own = [entries[rank] for rank in ranks if world.rank_nodes[rank] == node]
    geometry = Geometry(world, entries)
    rows = [
        (geometry.row_bytes(stripe), geometry.fixed_row_bytes(stripe))
        for stripe, _ in geometry.rows_of(node)
    ]
    blocks = [(each.payload_bytes, each.fixed_bytes) for each in own]
    return MemoryNeed(
        slots=sum(_files_bytes(*each, files=slots_per_rank) for each in blocks),
        parity=sum(_files_bytes(*each, files=slots_per_rank) for each in rows if each[0]),
    )


def _files_bytes(nbytes: int, fixed_bytes: int, *, files: int) -> int:
    """Return the length of ``files`` slots or rows, and of the fixed part that they share."""
    if fixed_bytes >= nbytes:
        return files * _file_bytes(nbytes)
    return fixed_bytes + files * _file_bytes(nbytes - fixed_bytes)


def _file_bytes(nbytes: int) -> int:
    """Return the length of the slot or row file that has room for ``nbytes``."""
    return _HEADER_BYTES + align(max(nbytes, 1), _GRAIN_BYTES)


def _entry(world: SnapshotWorld, rank: int, nbytes: int, fixed_bytes: int) -> BlockEntry:
    """Return an entry that only stands for the length of a block."""
    return BlockEntry(
        generation=world.generation,
        step=0,
        rank=rank,
        payload_bytes=nbytes,
        index_bytes=0,
        index_crc32c=0,
        fixed_bytes=fixed_bytes,
    )
