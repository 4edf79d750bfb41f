"""Decoding of a lost block, or some of it, from any k fragments per part, with verification.

The index is decoded first: it holds the expected checksums of everything else. The actual ones are
computed as the bytes are stored, so that the block is not read again for verification.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Final

import numpy as np
from typing_extensions import Buffer

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.memory.block import BlockCheck, Verified, index_offset
from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.sums import SUM_BYTES, Lengths, Sums, combined
from holdfast.ckpt.parity.erasure import codec_named
from holdfast.ckpt.parity.stripes import ALIGN_BYTES, BlockRecovery, Geometry, plan_recovery
from holdfast.ckpt.sidecar.core.messages import Key, ReadRow, SnapshotHoldings
from holdfast.ckpt.sidecar.reading.sources import Sources

_NONE: Final = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRange:
    """Bytes ``lo … hi`` of a lost block, which one recovery decodes ``into`` a buffer."""

    recovery: BlockRecovery
    lo: int
    hi: int
    into: memoryview


def parts_of(
    plan: Sequence[BlockRecovery], size: int, wanted: Iterable[tuple[int, memoryview]]
) -> list[DecodedRange]:
    """Cut the wanted ranges of a block into parts of at most ``size`` bytes.

    ``wanted`` are the first bytes of ranges, each with the buffer to fill from there on. Parts end
    at multiples of ``size`` in the block, and where a recovery ends.
    """
    found = []
    for first, into in wanted:
        for each in plan:
            at = max(first, each.at)
            end = min(first + len(into), each.at + each.hi - each.lo)
            while at < end:
                stop = min(end, at - at % size + size)
                room = into[at - first : stop - first]
                found.append(DecodedRange(recovery=each, lo=at, hi=stop, into=room))
                at = stop
    return found


class Decoding:
    """Decodes one lost block, or ranges of it, from any set of fragments."""

    def __init__(
        self,
        sources: Sources,
        geometry: Geometry,
        key: Key,
        answers: tuple[dict[str, SnapshotHoldings], Iterator[dict[str, SnapshotHoldings]]],
        entry: BlockEntry,
    ) -> None:
        self.geometry, self.entry = geometry, entry
        self._sources, self._key = sources, key
        self._found, self._outstanding = answers
        self._origin = f"rebuilt block of rank {entry.rank}"

    def plan(self, left_out: Iterable[str]) -> tuple[BlockRecovery, ...] | None:
        """Plan without some nodes, after all have answered; None if too few fragments are left."""
        for found in self._outstanding:
            self._found = found
        rest = {node: each for node, each in self._found.items() if node not in left_out}
        plan, _ = plan_recovery(
            self.geometry,
            self.entry.rank,
            holders=holders_of(rest),
            rows=rows_of(rest, self.geometry),
        )
        return plan

    def decode(self, plan: Sequence[BlockRecovery], block: memoryview) -> Verified:
        """Decode the whole block and verify it.

        Raises ``CorruptError`` when it differs from the sealed one, ``PeerError`` or
        ``NotFoundError`` when a fragment is unavailable.
        """
        at = index_offset(self.entry.payload_bytes)
        at -= at % ALIGN_BYTES  # aligned for the processor
        self.read(plan, [(at, block[at:])])
        check = BlockCheck(block, self.entry, origin=self._origin)
        proof = _Proof(check, len(block), cuts=[each.at for each in plan])
        self._run(parts_of(plan, self._sources.size(plan), [(0, block)]), proof)
        self._sources.check_current()
        return proof.verified()

    def read_index(self, plan: Sequence[BlockRecovery]) -> bytes:
        """Decode the index and check it; raises as `decode`."""
        text = bytearray(self.entry.index_bytes)
        self.read(plan, [(index_offset(self.entry.payload_bytes), memoryview(text))])
        if crc32c(text) != self.entry.index_crc32c:
            raise CorruptError(f"{self._origin}: the index fails its checksum; use another copy")
        return bytes(text)

    def read(self, plan: Sequence[BlockRecovery], wanted: Iterable[tuple[int, memoryview]]) -> None:
        """Decode some bytes without a check; the caller checks them.

        Raises ``PeerError`` or ``NotFoundError`` when a fragment is unavailable.
        """
        self._sources.connect(nodes_of(plan), self._found)
        self._run(parts_of(plan, self._sources.size(plan), wanted), None)
        self._sources.check_current()

    def _run(self, parts: Sequence[DecodedRange], proof: _Proof | None) -> None:
        """Decode parts, some in parallel; after return or raise no thread writes to the block."""
        failed, todo = threading.Event(), iter(parts)  # each lane takes the next part
        lanes = max(min(self._sources.lanes(part.recovery for part in parts), len(parts)), 1)

        def work() -> None:
            try:
                for part in todo:
                    if not failed.is_set():
                        self._part(part, proof)
            except Exception:  # on any error the others stop; raised again
                failed.set()
                raise

        if lanes == 1:
            work()
            return
        pending = [self._sources.pool.submit(work) for _ in range(lanes)]
        wait(pending)  # nothing of this attempt may still write when the next one begins
        for each in pending:
            each.result()

    def _part(self, part: DecodedRange, proof: _Proof | None) -> None:
        recovery, first = part.recovery, part.recovery.lo - part.recovery.at
        codec = codec_named()(self.geometry.columns(recovery.stripe), self.geometry.m)
        window = (part.lo - recovery.at, part.hi - recovery.at)
        fragments: dict[int, Buffer] = {
            read.column: self._sources.column(read, window, self._key) for read in recovery.columns
        }
        for row in recovery.rows:
            body = ReadRow(
                generation=self._key.generation,
                step=self._key.step,
                stripe=recovery.stripe,
                row=row.row,
                at=part.lo + first,
                nbytes=part.hi - part.lo,
            )
            fragments[codec.k + row.row] = self._sources.row(row.node, body)
        cuts = proof.cuts(part.lo, part.hi) if proof is not None else _NONE
        sums = codec.decode(recovery.column, fragments, part.into, cuts=cuts.tolist())
        if proof is not None:
            proof.note(part.lo, sums)


class _Proof:
    """The checksums of a block between all positions where a sum or a chunk begins or ends."""

    def __init__(self, check: BlockCheck, nbytes: int, *, cuts: Sequence[int]) -> None:
        self._check, self._nbytes = check, nbytes
        self._first, self._last = check.starts, check.starts + check.lengths
        grid = np.arange(0, nbytes, SUM_BYTES, dtype=np.int64)
        edges = [grid, self._first, self._last, np.array([*cuts, 0, nbytes], dtype=np.int64)]
        self._edges: Lengths = np.unique(np.concatenate(edges))
        self._sums = np.zeros(len(self._edges) - 1, dtype=np.uint32)
        self._grid = grid

    def cuts(self, lo: int, hi: int) -> Lengths:
        """Return the positions at which to cut bytes ``lo … hi``, counted from ``lo``."""
        first, last = np.searchsorted(self._edges, [lo, hi])
        return self._edges[first + 1 : last] - lo

    def note(self, lo: int, sums: Sums) -> None:
        """Store the checksums of the parts from ``lo`` on."""
        first = int(np.searchsorted(self._edges, lo))
        self._sums[first : first + len(sums)] = sums

    def verified(self) -> Verified:
        """Compare with the expected checksums, once all are stored. Raises ``CorruptError``."""
        return self._check.verified(
            self._over(self._grid, np.append(self._grid[1:], self._nbytes)),
            self._over(self._first, self._last),
        )

    def _over(self, starts: Lengths, ends: Lengths) -> Sums:
        first, last = np.searchsorted(self._edges, starts), np.searchsorted(self._edges, ends)
        return combined(self._sums, np.diff(self._edges), starts=first, ends=last)


# -- inventories of nodes ------------------------------------------------------------------------


def nodes_of(plan: Iterable[BlockRecovery]) -> set[str]:
    """Return the nodes that a plan reads from."""
    recoveries = tuple(plan)
    rows = {row.node for recovery in recoveries for row in recovery.rows}
    columns = (read for recovery in recoveries for read in recovery.columns)
    return rows | {node for read in columns for _, node in read.spans}


def entries_of(
    found: Mapping[str, SnapshotHoldings], key: Key, ranks: range
) -> dict[int, BlockEntry]:
    """Return the blocks that nodes know, by rank. Raises ``CorruptError`` if they differ."""
    entries: dict[int, BlockEntry] = {}
    for holdings in found.values():
        for entry in (*holdings.sealed, *holdings.blocks):
            if (entry.generation, entry.step) != (key.generation, key.step):
                continue
            if entry.rank not in ranks:
                continue
            if entries.setdefault(entry.rank, entry) != entry:
                raise CorruptError(f"rank {entry.rank} is known with two different blocks")
    return entries


def holders_of(found: Mapping[str, SnapshotHoldings]) -> dict[int, str]:
    """Return a node that has the block, by rank."""
    return {entry.rank: node for node, each in found.items() for entry in each.blocks}


def rows_of(
    found: Mapping[str, SnapshotHoldings], geometry: Geometry
) -> dict[tuple[int, int], str]:
    """Return the node that has the row, by (stripe, row)."""
    return {
        (parity.stripe, parity.row): node
        for node, each in found.items()
        for parity in each.parities
        if 0 <= parity.stripe < geometry.n and 0 <= parity.row < geometry.m
        if parity.nbytes == geometry.row_bytes(parity.stripe)
    }
