"""The data columns that this node owns, served to the holders of parity rows.

A holder asks for the location of a column's bytes. On this host it maps the slots itself and reads
them there; from another host it requests the bytes, or their differences from an earlier step's.
All answers can be repeated: the holder alone decides when its row is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from holdfast.ckpt.errors import CorruptError, GivenUpError, MismatchError, NotFoundError
from holdfast.ckpt.memory.block import check_block
from holdfast.ckpt.memory.hosts import FileRef
from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.sums import CheckedBlock, Flags, Sums, runs_of, sum_of_range
from holdfast.ckpt.parity.stripes import Geometry, Span
from holdfast.ckpt.sidecar.core.book import Snapshot, SnapshotKey, SnapshotPhase
from holdfast.ckpt.sidecar.core.core import Core, Op
from holdfast.ckpt.sidecar.core.messages import AskBytes, AskColumn, Column, ColumnSpan, unparse
from holdfast.ckpt.sidecar.core.slots import Slot, same_blocks
from holdfast.ckpt.sidecar.core.wire import PART_BYTES
from holdfast.ckpt.sidecar.parity.changes import are_disjoint, changed_ranges
from holdfast.ckpt.transport import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """The contents of a column in one step: spans, and the pinned slot of each."""

    spans: tuple[Span, ...]
    slots: tuple[Slot, ...]
    filled_bytes: int


@dataclass(slots=True, kw_only=True)
class _ColumnStep:
    """The cached facts of a snapshot: its stripes, and the runs equal to an earlier step's."""

    geometry: Geometry
    same: dict[tuple[int, int], Flags] = field(default_factory=dict)


class Columns:
    """Serves the columns of this node's blocks."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._steps: dict[SnapshotKey, _ColumnStep] = {}

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {"column": (AskColumn, self._column), "column_bytes": (AskBytes, self._bytes)}

    def geometry(self, snapshot: Snapshot) -> Geometry:
        """Return the stripes of a committed snapshot, computed once; called under the lock."""
        step = self._steps.get(snapshot.key)
        if step is None:
            step = self._steps[snapshot.key] = _ColumnStep(geometry=snapshot.geometry())
        return step.geometry

    def released(self, key: SnapshotKey) -> None:
        """Forget the stripes of a snapshot."""
        self._steps.pop(key, None)

    # -- asking ----------------------------------------------------------------------------------

    def _column(self, request: Request, body: AskColumn) -> None:
        key, base = (body.generation, body.step), (body.generation, body.base)
        new = self._fill(key, body.stripe, body.column, start=body.start)
        old: _Filling | None = None
        if body.base >= 0 and body.host != self._core.host and self._is_there(base):
            old = self._fill(base, body.stripe, body.column, start=body.start)
        length = self.geometry(self._core.book.snapshots[key]).row_bytes(body.stripe)

        def describe() -> None:
            with self._pinned(new, old):
                sums = [self._sums(slot) for slot in new.slots]
                spans = [_described(*each) for each in zip(new.spans, new.slots, strict=True)]
                changed = None
                if old is not None:
                    same = self._compare(new, old)
                    limit = min(length, max(new.filled_bytes, old.filled_bytes))
                    changed = changed_ranges(new.spans, old.spans, same, length=limit)
                column = Column(host=self._core.host, spans=tuple(spans), changed=changed)
                parts = [
                    np.asarray(each[span.first : span.first + span.count], dtype="<u4")
                    for each, span in zip(sums, spans, strict=True)
                ]
                request.reply(unparse(column), [b"".join(part.tobytes() for part in parts)])

        self._core.submit(request, describe)

    def _bytes(self, request: Request, body: AskBytes) -> None:
        key, base = (body.generation, body.step), (body.generation, body.base)
        if body.base >= 0 and not self._is_there(base):
            raise MismatchError(f"step {body.base} was released: request whole columns")
        self._check_ranges(body)
        new = self._fill(key, body.stripe, body.column)
        old = self._fill(base, body.stripe, body.column) if body.base >= 0 else None

        def answer() -> None:
            nbytes = _size(body.ranges)
            with self._pinned(new, old), self._core.meters.timed("exchange", nbytes):
                straight = None
                if old is None and request.seals_at_once:
                    straight = self._straight(new, body.ranges)
                checks, data = straight or self._copied(new, old, body.ranges)
                self._core.count("fragment_bytes_sent", nbytes)
                request.reply(checks, [data])

        self._core.submit(request, answer)

    @staticmethod
    def _check_ranges(body: AskBytes) -> None:
        """Refuse ranges that overlap, which would be added twice, or that are too large."""
        if not are_disjoint(body.ranges) or _size(body.ranges) > PART_BYTES:
            raise MismatchError(
                f"the ranges {body.ranges[:4]} … are not in order, or of more than "
                f"{PART_BYTES:,} bytes; ask for less at once"
            )

    # -- slots -----------------------------------------------------------------------------------

    def _is_there(self, key: SnapshotKey) -> bool:
        snapshot = self._core.book.snapshots.get(key)
        if snapshot is None or snapshot.phase is SnapshotPhase.SEALING:
            return False
        ranks = [r for r, node in enumerate(snapshot.world.rank_nodes) if node == self._core.node]
        return all(self._core.slots.holding((*key, rank)) for rank in ranks)

    def _fill(self, key: SnapshotKey, stripe: int, column: int, *, start: int = 0) -> _Filling:
        """Return the contents of a column behind ``start``, its slots pinned.

        Called under the lock.
        """
        core, book = self._core, self._core.book
        book.require(key[0])
        if book.is_gone(key):
            raise GivenUpError(f"step {key[1]} of generation {key[0]} was released")
        snapshot = book.snapshots.get(key)
        if snapshot is None or snapshot.phase is SnapshotPhase.SEALING:
            raise NotFoundError(f"step {key[1]} is not known to be sealed here yet; try again")
        geometry = self.geometry(snapshot)
        if not (0 <= stripe < geometry.n and 0 <= column < geometry.columns(stripe)):
            raise MismatchError(f"there is no column {column} of stripe {stripe} in this group")
        filled = geometry.filled_bytes(stripe, column)
        spans = geometry.spans_from(stripe, column, start)
        found = [core.slots.holding((*key, span.rank)) for span in spans]
        slots = tuple(slot for slot in found if slot is not None)
        if len(slots) < len(spans):
            raise GivenUpError(f"node {core.node} has not all of column {column}, stripe {stripe}")
        for slot in slots:
            core.slots.pin(slot)
        return _Filling(spans=spans, slots=slots, filled_bytes=filled)

    @contextmanager
    def _pinned(self, *fillings: _Filling | None) -> Iterator[None]:
        try:
            yield
        finally:
            for filling in fillings:
                if filling is not None:
                    self._core.unpin(*filling.slots)

    def _sums(self, slot: Slot) -> Sums:
        """Return a block's sums: from its seal, or verified now where an earlier process sealed."""
        if slot.sums is None:
            if slot.entry is None:
                raise GivenUpError(f"slot {slot.number} was released")
            try:
                slot.sums = check_block(slot.view(), slot.entry, origin=slot.file.path.name).sums
            except CorruptError as error:
                raise self._spoiled(slot.entry, error) from error
        return slot.sums

    def _spoiled(self, entry: BlockEntry, error: CorruptError) -> GivenUpError:
        self._core.count("corrupt_columns")
        return GivenUpError(
            f"the block of rank {entry.rank} on node {self._core.node} changed since it was "
            f"sealed, step {entry.step} stays unprotected: {error}"
        )

    # -- bytes -----------------------------------------------------------------------------------

    def _compare(self, new: _Filling, old: _Filling) -> dict[int, Flags]:
        """Return the runs of each rank's block that are the same in both steps."""
        before = {span.rank: slot for span, slot in zip(old.spans, old.slots, strict=True)}
        found: dict[int, Flags] = {}
        for span, slot in zip(new.spans, new.slots, strict=True):
            other = before.get(span.rank)
            if other is None or slot.key is None or other.key is None:
                continue
            step = self._steps.get(slot.key[:2])
            at = (span.rank, other.key[1])
            if step is None or at not in step.same:
                sums = self._sums(slot), self._sums(other)
                same = same_blocks(slot, sums[0], other, sums[1])
                if step is not None:
                    step.same[at] = same
                found[span.rank] = same
            else:
                found[span.rank] = step.same[at]
        return found

    def _straight(
        self, filling: _Filling, ranges: Sequence[tuple[int, int]]
    ) -> tuple[list[int], memoryview] | None:
        """Return the checksum and the bytes of one range that lies in one block, without a copy.

        They are checked against the sealed sums. None for other ranges; see `_copied`.
        """
        if len(ranges) != 1:
            return None
        ((lo, hi),) = ranges
        for span, slot in zip(filling.spans, filling.slots, strict=True):
            if span.into <= lo and hi <= span.into + span.nbytes:
                sums, at = self._sums(slot), span.at + lo - span.into
                block = CheckedBlock(slot.view(), sums, origin=slot.file.path.name)
                part = self._taken(block, slot, at, hi - lo)
                return [sum_of_range(slot.view(), sums, at, hi - lo)], part
        return None

    def _taken(self, block: CheckedBlock, slot: Slot, at: int, nbytes: int) -> memoryview:
        """Return checked bytes of a slot; a damaged one gives its step up."""
        try:
            return block.take(at, nbytes)
        except CorruptError as error:
            if slot.entry is None:
                raise
            raise self._spoiled(slot.entry, error) from error

    def _copied(
        self, new: _Filling, old: _Filling | None, ranges: Sequence[tuple[int, int]]
    ) -> tuple[list[int], memoryview]:
        """Return the checksums and the bytes of ranges, or of their differences from ``old``."""
        data = self._gather(new, ranges)
        if old is not None:
            np.bitwise_xor(data, self._gather(old, ranges), out=data)
        return _checks(data, ranges), data.data

    def _gather(self, filling: _Filling, ranges: Sequence[tuple[int, int]]) -> Bytes:
        """Return bytes of a column, checked against the sealed sums; gaps are zeros."""
        data = np.zeros(_size(ranges), dtype=np.uint8)
        at = 0
        blocks = [
            CheckedBlock(slot.view(), self._sums(slot), origin=slot.file.path.name)
            for slot in filling.slots
        ]
        for lo, hi in ranges:
            for span, slot, block in zip(filling.spans, filling.slots, blocks, strict=True):
                a, b = max(span.into, lo), min(span.into + span.nbytes, hi)
                if a >= b:
                    continue
                part = self._taken(block, slot, span.at + a - span.into, b - a)
                np.copyto(data[at + a - lo : at + b - lo], np.frombuffer(part, dtype=np.uint8))
            at += hi - lo
        return data


Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def _checks(data: Bytes, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the CRC32C of each range, whose bytes follow each other in ``data``."""
    ends = list(accumulate(hi - lo for lo, hi in ranges))
    return [
        crc32c(data[end - hi + lo : end].data) for end, (lo, hi) in zip(ends, ranges, strict=True)
    ]


def _size(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(hi - lo for lo, hi in ranges)


def _described(span: Span, slot: Slot) -> ColumnSpan:
    if slot.entry is None:
        raise GivenUpError(f"slot {slot.number} was released")
    first, count = runs_of(span.at, span.nbytes)
    return ColumnSpan(
        entry=slot.entry,
        file=FileRef.of(slot.file.path),
        at=span.at,
        nbytes=span.nbytes,
        into=span.into,
        first=first,
        count=count,
    )
