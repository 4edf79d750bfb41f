"""Parts of other hosts' blocks, fetched into this process's memory before a restore.

A rank that is about to join copies the parts it will need while the others train, and follows them
from step to step. The holder of a block compares bytes with an earlier step's, and only the
differing ones travel again. A part is not trusted by itself: its user checks it against the
checksum in the index of the step that is restored.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np

from holdfast.ckpt.geometry.shard_index import ChunkRef
from holdfast.ckpt.memory.records import BlockSource, RestorePoint, SnapshotWorld
from holdfast.ckpt.native.isal import crc32c

Range: TypeAlias = tuple[int, int]
"""``(offset, length)`` in bytes of a block."""

StepKey: TypeAlias = tuple[int, int]
"""(generation, step)."""

REQUEST_BYTES: Final = 4 << 20


class Comparer(Protocol):
    """The part of a sidecar's client that `compare` uses."""

    def changed(
        self, world: SnapshotWorld, step: int, rank: int, *, base: StepKey
    ) -> tuple[Range, ...] | None: ...


class Donor(Comparer, Protocol):
    """The part of a sidecar's client that `fetch` uses."""

    def read(
        self, world: SnapshotWorld, step: int, rank: int, ranges: Sequence[Range]
    ) -> list[memoryview]: ...

    def follow(self, world: SnapshotWorld, step: int, rank: int) -> None: ...


class _PrefetchedRange:
    """A buffer for one range of a block, and the snapshot of its bytes, if any."""

    __slots__ = ("at", "key", "nbytes", "room")

    def __init__(self, at: int, room: memoryview) -> None:
        self.at, self.nbytes, self.room = at, room.nbytes, room
        self.key: StepKey | None = None


class Ahead:
    """The wanted parts of some ranks' blocks, each with the last step it is known to match.

    ``wanted`` names the ranges by rank. Safe between threads.
    """

    def __init__(self, wanted: Mapping[int, Sequence[Range]]) -> None:
        self._lock = threading.Lock()
        self._frozen = False
        self._parts: dict[int, dict[int, _PrefetchedRange]] = {}
        for rank, ranges in wanted.items():
            room = np.empty(sum(nbytes for _, nbytes in ranges), dtype=np.uint8).data
            parts, begin = self._parts.setdefault(rank, {}), 0
            for at, nbytes in sorted(ranges):
                parts[at] = _PrefetchedRange(at, room[begin : begin + nbytes])
                begin += nbytes

    @property
    def nbytes(self) -> int:
        """The number of wanted bytes, which is the memory taken."""
        return sum(part.nbytes for parts in self._parts.values() for part in parts.values())

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks whose blocks have wanted parts."""
        return frozenset(self._parts)

    def held_bytes(self, key: StepKey) -> int:
        """Return how many of the bytes match snapshot ``key``."""
        with self._lock:
            return sum(
                part.nbytes
                for parts in self._parts.values()
                for part in parts.values()
                if part.key == key
            )

    def stale(self, key: StepKey, rank: int) -> list[Range]:
        """Return the ranges that are not known to match ``key``, in order."""
        with self._lock:
            parts = self._parts.get(rank, {}).values()
            return [(part.at, part.nbytes) for part in parts if part.key != key]

    def bases(self, key: StepKey, rank: int) -> set[StepKey]:
        """Return the other snapshots of which there are parts."""
        with self._lock:
            parts = self._parts.get(rank, {}).values()
            return {part.key for part in parts if part.key is not None and part.key != key}

    def advance(
        self, rank: int, *, base: StepKey, to: StepKey, changed: Sequence[Range] | None
    ) -> None:
        """Record the bytes that differ between two snapshots: other parts of ``base`` match both.

        ``changed`` is None if they are unknown.
        """
        if changed is None:
            return
        starts, ends = [at for at, _ in changed], [at + nbytes for at, nbytes in changed]
        with self._lock:
            for part in self._parts.get(rank, {}).values():
                before = bisect_right(starts, part.at + part.nbytes - 1)
                if part.key == base and (not before or ends[before - 1] <= part.at):
                    part.key = to

    def put(self, key: StepKey, rank: int, *, at: int, data: memoryview) -> None:
        """Store bytes of a snapshot's block; does nothing once frozen."""
        part = self._parts.get(rank, {}).get(at)
        with self._lock:
            if part is not None and part.nbytes == data.nbytes and not self._frozen:
                part.room[:] = data
                part.key = key

    def freeze(self) -> None:
        """Forbid all writes from now on: views that `take` returned stay unchanged."""
        with self._lock:
            self._frozen = True

    def has(self, key: StepKey, ref: ChunkRef) -> bool:
        """Return whether a chunk is present, as far as is known."""
        part = self._parts.get(ref.writer, {}).get(ref.chunk.at)
        return part is not None and part.key == key and part.nbytes == ref.chunk.nbytes

    def take(self, key: StepKey, ref: ChunkRef) -> memoryview | None:
        """Return a chunk's bytes if they have its checksum; None if they are not present."""
        if not self.has(key, ref):
            return None
        room = self._parts[ref.writer][ref.chunk.at].room
        return room if crc32c(room) == ref.chunk.crc32c else None


def wanted_of(refs: Sequence[ChunkRef], ranks: frozenset[int]) -> dict[int, list[Range]]:
    """Return the ranges of chunks by rank, of ``ranks`` only."""
    found: dict[int, dict[int, int]] = {}
    for ref in refs:
        if ref.writer in ranks and ref.chunk.nbytes:
            found.setdefault(ref.writer, {})[ref.chunk.at] = ref.chunk.nbytes
    return {rank: sorted(ranges.items()) for rank, ranges in found.items()}


def compare(ahead: Ahead, point: RestorePoint, source: BlockSource, donor: Comparer) -> None:
    """Ask the holder of a block which of its parts have not changed up to ``point``.

    Raises the errors of the holder.
    """
    key = (point.world.generation, point.step)
    if source.rebuilt:
        return
    for base in sorted(ahead.bases(key, source.rank)):
        found = donor.changed(point.world, point.step, source.rank, base=base)
        ahead.advance(source.rank, base=base, to=key, changed=found)


def fetch(ahead: Ahead, point: RestorePoint, donor_of: Callable[[str], Donor]) -> Iterator[int]:
    """Fetch changed and missing parts, request by request; yield the bytes of each request.

    Raises the errors of the holders, such as ``NotFoundError`` when the step was released
    meanwhile.
    """
    key = (point.world.generation, point.step)
    sources = [each for each in point.sources if not each.rebuilt and each.rank in ahead.ranks]
    for source in sources:  # first: while bytes travel, the step may be released
        donor = donor_of(source.node)
        compare(ahead, point, source, donor)
        donor.follow(point.world, point.step, source.rank)
    for source in sources:
        donor = donor_of(source.node)
        for batch in _batches(ahead.stale(key, source.rank)):
            parts = donor.read(point.world, point.step, source.rank, batch)
            for (at, _), data in zip(batch, parts, strict=True):
                ahead.put(key, source.rank, at=at, data=data)
            yield sum(nbytes for _, nbytes in batch)


def _batches(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Cut ranges into requests of about `REQUEST_BYTES`."""
    batch: list[Range] = []
    size = 0
    for at, nbytes in ranges:
        if batch and size + nbytes > REQUEST_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((at, nbytes))
        size += nbytes
    if batch:
        yield batch
