"""Data columns of other sidecars on this host, read by mapping: no copy, no encryption.

The owner may reuse a slot for the next snapshot at any time. So a reader checks the slot's header
before it begins and after it has ended, as with a sequence lock: if the header names the wanted
block both times, no process wrote in between. Every run that is read is checked against the owner's
sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.block import SlotState, block_bytes
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.native.isal import address_of
from holdfast.ckpt.native.streaming import Words
from holdfast.ckpt.native.sums import SUM_BYTES, CheckedBlock, Lengths, Sums
from holdfast.ckpt.sidecar.core.messages import Column, ColumnSpan

_HELD = (SlotState.SEALED, SlotState.COMMITTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MappedPart:
    span: ColumnSpan
    slot: SlotFile
    sums: Sums


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ColumnRuns:
    """Runs that fill a column, in order: addresses, positions in the column, and the owner's sums.

    The addresses are valid as long as ``views`` are kept.
    """

    views: tuple[memoryview, ...]
    sources: Words
    into: Lengths
    nbytes: Lengths
    sums: Sums
    ranks: Lengths
    node: str

    def describe(self, run: int) -> str:
        """Return in words that a run differs from the sealed one."""
        return (
            f"node {self.node}, rank {self.ranks[run]}: bytes {self.into[run]:,}+"
            f"{self.nbytes[run]:,} of the column are not what was sealed; use another copy"
        )


class MappedColumn:
    """A column whose blocks are all mapped here."""

    def __init__(self, parts: tuple[_MappedPart, ...], *, node: str, run: bytes) -> None:
        self._parts, self._node, self._run = parts, node, run

    @classmethod
    def open(
        cls, column: Column, sums: Sums, maps: SlotMaps, *, node: str, run: bytes
    ) -> MappedColumn | None:
        """Map the blocks of a column of this host; None if that is not possible."""
        parts, at = [], 0
        for span in column.spans:
            if not span.file.is_here():
                return None
            try:
                slot = maps.open(span.file.path)
            except CkptError:
                return None
            if slot.capacity < block_bytes(span.entry):
                return None
            parts.append(_MappedPart(span=span, slot=slot, sums=sums[at : at + span.count]))
            at += span.count
        mapped = cls(tuple(parts), node=node, run=run)
        return mapped if mapped.is_current() else None

    def is_current(self) -> bool:
        """Return whether every slot still holds the wanted block."""
        for part in self._parts:
            try:
                header = part.slot.read_header(run=self._run)
            except ValueError:  # unmapped meanwhile: its file was removed
                return False
            if header is None or header.state not in _HELD or header.entry() != part.span.entry:
                return False
        return True

    def runs(self) -> ColumnRuns | None:
        """Return the runs that fill the column, None if it has one of them only in part.

        Raises ``ValueError`` if a file was removed meanwhile.
        """
        sources, into, nbytes, ranks = [], [], [], []
        views = [part.slot.block(block_bytes(part.span.entry)) for part in self._parts]
        for part, view in zip(self._parts, views, strict=True):
            span, end = part.span, part.span.at + part.span.nbytes
            if span.at % SUM_BYTES or (end % SUM_BYTES and end != len(view)):
                return None
            at = np.arange(span.at, end, SUM_BYTES, dtype=np.int64)
            sources.append(at.astype(np.uint64) + np.uint64(address_of(view)))
            into.append(at - span.at + span.into)
            nbytes.append(np.minimum(end - at, SUM_BYTES))
            ranks.append(np.full(len(at), span.entry.rank, dtype=np.int64))
        if not views:
            return None
        return ColumnRuns(
            views=tuple(views),
            sources=np.concatenate(sources),
            into=np.concatenate(into),
            nbytes=np.concatenate(nbytes),
            sums=np.concatenate([part.sums for part in self._parts]),
            ranks=np.concatenate(ranks),
            node=self._node,
        )

    def reader(self) -> ColumnReader:
        """Return a reader for one thread."""
        blocks = [
            (
                part.span,
                view := part.slot.block(block_bytes(part.span.entry)),
                CheckedBlock(
                    view,
                    part.sums,
                    first=part.span.first,
                    origin=f"node {self._node}, rank {part.span.entry.rank}",
                ),
            )
            for part in self._parts
        ]
        return ColumnReader(blocks)


class ColumnReader:
    """Reads a column sequentially."""

    def __init__(self, blocks: list[tuple[ColumnSpan, memoryview, CheckedBlock]]) -> None:
        self._blocks = blocks

    def adjacent(self, lo: int, hi: int) -> memoryview | None:
        """Return bytes ``lo … hi`` if they are adjacent, without zeros at the end; else None.

        Call `check` before using them.
        """
        found = [
            (a - lo, view[span.at + a - span.into : span.at + b - span.into])
            for span, view, _ in self._blocks
            if (a := max(span.into, lo)) < (b := min(span.into + span.nbytes, hi))
        ]
        if not found:
            return memoryview(b"")
        return found[0][1] if len(found) == 1 and found[0][0] == 0 else None

    def check(self, lo: int, hi: int) -> None:
        """Raise ``CorruptError`` for bytes that differ from the sealed ones."""
        for _ in self.parts(lo, hi):
            pass

    def parts(self, lo: int, hi: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the contents of bytes ``lo … hi``: positions in the column, and the bytes.

        Raises ``CorruptError`` for bytes that differ from the sealed ones.
        """
        for span, _, block in self._blocks:
            a, b = max(span.into, lo), min(span.into + span.nbytes, hi)
            if a < b:
                yield a, block.take(span.at + a - span.into, b - a)
