"""Parity rows of a single column, which are copies of it: made and checked in one pass.

Every run of the column is copied past the cache and checksummed on the way, and that checksum is
compared with the owner's. So the check covers the bytes that arrived, and each is read once.
"""

from __future__ import annotations

import threading

import numpy as np

from holdfast.ckpt.errors import GivenUpError
from holdfast.ckpt.native.isal import address_of
from holdfast.ckpt.native.streaming import MemoryRuns
from holdfast.ckpt.native.sums import Lengths, Sums, combined, of_zeros
from holdfast.ckpt.sidecar.parity.mapped import ColumnRuns, MappedColumn
from holdfast.ckpt.sidecar.parity.row_build import Build, MovedError, cut_row


class Mirroring:
    """One pass over the mapped column of a row: ``parts`` of the row in parallel."""

    def __init__(self, build: Build, columns: dict[int, MappedColumn], runs: ColumnRuns) -> None:
        self._build, self.columns, self._runs = build, columns, runs
        self.parts = cut_row(build.start, build.nbytes)
        self._gaps = _gaps(runs, build.start, build.nbytes)
        self._lock = threading.Lock()
        self._done: list[tuple[Lengths, Lengths, Sums]] = []

    def encode(self, lo: int, hi: int) -> tuple[int, int | None]:
        """Copy the runs that begin in a part, and clear the gaps; see `Encoding.encode`."""
        runs, row = self._runs, self._build.buffer()
        first, last = np.searchsorted(runs.into, [lo, hi])
        start = np.uint64(address_of(row))
        targets = runs.into[first:last].astype(np.uint64) + start
        copying = MemoryRuns(
            runs.sources[first:last], targets, runs.nbytes[first:last].astype(np.uint64)
        )
        copying.copy(0, int(last - first))
        wrong = np.flatnonzero(copying.sums != runs.sums[first:last])
        if wrong.size:
            raise GivenUpError(runs.describe(int(first + wrong[0])))
        at, nbytes = self._clear(lo, hi)
        if not all(each.is_current() for each in self.columns.values()):
            step = self._build.key[1]
            raise MovedError(f"a column of step {step} was released while it was read")
        done = (
            np.concatenate([runs.into[first:last], at]),
            np.concatenate([runs.nbytes[first:last], nbytes]),
            np.concatenate([copying.sums, of_zeros(nbytes)]),
        )
        return int(runs.nbytes[first:last].sum()), self._note(done)

    def _clear(self, lo: int, hi: int) -> tuple[Lengths, Lengths]:
        """Write zeros where no run goes; return the positions and lengths."""
        row = np.frombuffer(self._build.buffer(), dtype=np.uint8)
        found = [(max(a, lo), min(b, hi)) for a, b in self._gaps if max(a, lo) < min(b, hi)]
        for a, b in found:
            row[a:b] = 0
        ranges: Lengths = np.array(found, dtype=np.int64).reshape(-1, 2)
        return ranges[:, 0], ranges[:, 1] - ranges[:, 0]

    def _note(self, done: tuple[Lengths, Lengths, Sums]) -> int | None:
        """Return the checksum of the row after the last of its parts, else None."""
        with self._lock:
            self._done.append(done)
            if len(self._done) < len(self.parts):
                return None
        at, nbytes, sums = (np.concatenate(each) for each in zip(*self._done, strict=True))
        order = np.argsort(at)
        edges = np.array([0, len(order)], dtype=np.int64)
        rest = combined(sums[order], nbytes[order], starts=edges[:1], ends=edges[1:])
        return self._build.checksum(int(rest[0]))


def _gaps(runs: ColumnRuns, start: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the ranges of a row, from ``start`` on, that no run fills."""
    ends = np.concatenate([[start], runs.into + runs.nbytes])
    begins = np.concatenate([runs.into, [nbytes]])
    wide = np.flatnonzero(begins > ends)
    return list(zip(ends[wide].tolist(), begins[wide].tolist(), strict=True))
