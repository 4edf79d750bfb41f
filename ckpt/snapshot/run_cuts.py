"""Ranges of a block, cut where its runs end: one checksum per part serves ranges and runs.

CRC32C is linear. So the checksums of whole ranges (a tensor's bytes) and of whole runs (see
`holdfast.ckpt.native.sums`) follow from those of the parts, and each byte is read only once. Pure
arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.sums import SUM_BYTES, Lengths, Sums, combined, of_zeros


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OrderedRanges:
    """The parts of ranges that are in order and do not overlap.

    ``at`` and ``nbytes`` are the position and length of each part in the block, ``owner`` its
    range. ``edges[i]`` is the first part of range ``i``, with one more at the end.
    """

    at: Lengths
    nbytes: Lengths
    owner: Lengths
    edges: Lengths

    @classmethod
    def of(cls, at: Lengths, nbytes: Lengths) -> OrderedRanges:
        """Cut ranges; none of them is empty."""
        first = at // SUM_BYTES
        counts = -(-(at + nbytes) // SUM_BYTES) - first
        edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        owner = np.repeat(np.arange(len(at), dtype=np.int64), counts)
        run = np.arange(int(edges[-1]), dtype=np.int64) - edges[owner] + first[owner]
        low = np.maximum(run * SUM_BYTES, at[owner])
        high = np.minimum((run + 1) * SUM_BYTES, (at + nbytes)[owner])
        return cls(at=low, nbytes=high - low, owner=owner, edges=edges)

    def __len__(self) -> int:
        return len(self.at)

    def of_ranges(self, sums: Sums) -> Sums:
        """Return the checksum of each range from those of the parts."""
        return combined(sums, self.nbytes, starts=self.edges[:-1], ends=self.edges[1:])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cover:
    """Parts and the gaps between them, which hold zeros: every byte of a payload, in order.

    ``gaps`` are the positions of those zeros, which the caller writes. ``zeros`` are the gaps'
    checksums. ``order`` sorts parts and gaps by position, and ``nbytes`` is sorted so. ``edges``
    are the first of each run, with one more at the end.
    """

    payload_bytes: int
    gaps: Lengths
    zeros: Sums
    order: Lengths
    nbytes: Lengths
    edges: Lengths

    @classmethod
    def of(cls, parts: OrderedRanges, payload_bytes: int) -> Cover:
        """Return the cover of a payload."""
        ends = np.concatenate([[0], parts.at + parts.nbytes])
        starts = np.concatenate([parts.at, [payload_bytes]])
        wide = np.flatnonzero(starts > ends)
        gaps = OrderedRanges.of(ends[wide], (starts - ends)[wide])
        at = np.concatenate([parts.at, gaps.at])
        order = np.argsort(at, kind="stable")
        grid = np.arange(-(-payload_bytes // SUM_BYTES) + 1, dtype=np.int64) * SUM_BYTES
        return cls(
            payload_bytes=payload_bytes,
            gaps=_positions(gaps),
            zeros=of_zeros(gaps.nbytes),
            order=order,
            nbytes=np.concatenate([parts.nbytes, gaps.nbytes])[order],
            edges=np.searchsorted(at[order], grid).astype(np.int64),
        )

    def of_runs(self, sums: Sums, *, tail: bytes) -> Sums:
        """Return the checksum of each run of the payload followed by ``tail``.

        ``sums`` are the checksums of the parts.
        """
        every = np.concatenate([sums, self.zeros])[self.order]
        runs = combined(every, self.nbytes, starts=self.edges[:-1], ends=self.edges[1:]).tolist()
        room = -self.payload_bytes % SUM_BYTES
        if room and tail:
            runs[-1] = crc32c(tail[:room], runs[-1])
        rest = [crc32c(tail[at : at + SUM_BYTES]) for at in range(room, len(tail), SUM_BYTES)]
        return np.array(runs + rest, dtype=np.uint32)

    def newest(self, since: Lengths, *, born: int, step: int, nbytes: int) -> Lengths:
        """Return the step since which each run of a block of ``nbytes`` is the same.

        ``since`` are those of the parts. The gaps are the same since step ``born``, the bytes
        behind the payload only since ``step``.
        """
        gaps = np.full(len(self.zeros), born, dtype=np.int64)
        every = np.concatenate([since, gaps])[self.order]
        runs = np.maximum.reduceat(every, self.edges[:-1]) if len(every) else every
        found = np.full(-(-nbytes // SUM_BYTES), step, dtype=np.int64)
        whole = self.payload_bytes // SUM_BYTES
        found[:whole] = runs[:whole]
        return found


def _positions(parts: OrderedRanges) -> Lengths:
    """Return the position of each byte of ``parts``."""
    before = np.cumsum(parts.nbytes) - parts.nbytes
    found: Lengths = np.repeat(parts.at - before, parts.nbytes)
    return found + np.arange(len(found), dtype=np.int64)
