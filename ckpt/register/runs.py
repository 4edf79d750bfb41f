"""Sorting of many records in little memory: sorted runs in a temporary file, merged by name.

Names are few and records are many. So a run keeps the records of each name together, and the merge
goes from name to name: it holds the records of one name only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.geometry.spans import Ints, Spans
from holdfast.ckpt.register.records import Corner
from holdfast.ckpt.store.refusals import refusals

RUN_BYTES: Final = 128 << 20
"""The memory of a run, about; then it is written out."""

_OVERHEAD_BYTES: Final = 240
"""The memory of a record's corners and of Python's objects, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedRecords:
    """The records of one name, sorted by their boxes' first corners: encoded, and the boxes."""

    name: str
    spans: Spans
    encoded: Sequence[bytes]

    def corners(self, first: int, end: int) -> tuple[Corner, Corner]:
        """Return the corners of the box around the records ``first … end - 1``."""
        low, high = self.spans.lo[:, first:end], self.spans.hi[:, first:end]
        return tuple(low.min(axis=1).tolist()), tuple(high.max(axis=1).tolist())


class _Live:
    """The records of one name that are in memory, in the order in which they came."""

    __slots__ = ("encoded", "low", "shape")

    def __init__(self) -> None:
        self.low: list[Corner] = []
        self.shape: list[Corner] = []
        self.encoded: list[bytes] = []

    def corners(self) -> tuple[Ints, Ints]:
        """Return the first and the last corners as arrays of shape (dims, records)."""
        low = _columns(self.low)
        return low, low + _columns(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenRun:
    """The place of the records of one name in the temporary file."""

    at: int
    count: int
    dims: int
    nbytes: int


class SortedRuns(Closing):
    """Takes records in any order; returns them by name, sorted by box. Closing removes its file."""

    def __init__(self, *, run_bytes: int = RUN_BYTES) -> None:
        self._run_bytes, self._held = run_bytes, 0
        self._live: dict[str, _Live] = {}
        self._runs: dict[str, list[_WrittenRun]] = {}
        self._file: BinaryIO | None = None

    def add(self, name: str, low: Corner, shape: Corner, encoded: bytes) -> None:
        """Take one record, of the box at ``low``. All boxes of a name have the same dims."""
        live = self._live.get(name)
        if live is None:
            live = self._live[name] = _Live()
        live.low.append(low)
        live.shape.append(shape)
        live.encoded.append(encoded)
        self._held += len(encoded) + _OVERHEAD_BYTES
        if self._held >= self._run_bytes:
            self._write_out()

    def sorted(self) -> Iterator[SortedRecords]:
        """Yield the records, one name after the other."""
        for name in sorted({*self._live, *self._runs}):
            yield self._merged(name)

    def close(self) -> None:
        """Remove the temporary file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _merged(self, name: str) -> SortedRecords:
        parts = [self._read_back(written) for written in self._runs.pop(name, ())]
        if (live := self._live.pop(name, None)) is not None:
            parts.append((*live.corners(), live.encoded))
        lo, hi = (np.concatenate([part[side] for part in parts], axis=1) for side in (0, 1))
        encoded = list(chain.from_iterable(part[2] for part in parts))
        order = np.lexsort(lo[::-1]) if len(lo) else np.arange(len(encoded))
        return SortedRecords(
            name=name,
            spans=Spans(lo[:, order], hi[:, order]),
            encoded=[encoded[number] for number in order.tolist()],
        )

    def _write_out(self) -> None:
        """Append the records in memory to the temporary file."""
        with refusals(Path(tempfile.gettempdir()), "keep what a commit sorts in it"):
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="holdfast-register-")  # noqa: SIM115
            for name, live in self._live.items():
                lo, hi = live.corners()
                sizes = np.array([len(each) for each in live.encoded], dtype=np.int64)
                written = _WrittenRun(
                    at=self._file.tell(), count=len(sizes), dims=len(lo), nbytes=int(sizes.sum())
                )
                for column in (lo, hi, sizes):
                    self._file.write(column.tobytes())
                self._file.writelines(live.encoded)
                self._runs.setdefault(name, []).append(written)
            self._file.flush()
        self._live, self._held = {}, 0

    def _read_back(self, written: _WrittenRun) -> tuple[Ints, Ints, list[bytes]]:
        assert self._file is not None
        self._file.seek(written.at)
        shape = (written.dims, written.count)
        lo, hi = (self._numbers(written.dims * written.count).reshape(shape) for _ in range(2))
        sizes = self._numbers(written.count)
        blob = self._file.read(written.nbytes)
        ends = accumulate(sizes.tolist(), initial=0)
        return lo, hi, [blob[start:end] for start, end in pairwise(ends)]

    def _numbers(self, count: int) -> Ints:
        assert self._file is not None
        return np.frombuffer(self._file.read(count * 8), dtype=np.int64)


def _columns(corners: Sequence[Corner]) -> Ints:
    """Return corners as an array of shape (dims, corners)."""
    found = np.array(corners, dtype=np.int64).reshape(len(corners), len(corners[0]))
    return np.ascontiguousarray(found.T)
