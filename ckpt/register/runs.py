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
from typing import BinaryIO, Final, TypeAlias

import numpy as np

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.geometry.spans import Ints, Spans
from holdfast.ckpt.register.records import Corner
from holdfast.ckpt.store.refusals import refusals

RUN_BYTES: Final = 48 << 20
"""The memory of a run, about; then it is written out."""

_OVERHEAD_BYTES: Final = 100
"""The memory of a record's corners and of Python's objects, about."""

_Live: TypeAlias = tuple[Ints, Spans, Sequence[bytes]]
"""Records in memory: the numbers of their names, their boxes, and their bytes."""

_Part: TypeAlias = tuple[Ints, Ints, list[bytes]]
"""Records of one name: their boxes' corners of shape (dims, records), and their bytes."""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnsortedRecords:
    """Records in any order, encoded; ``which`` are the numbers of their names.

    ``dims`` are those of each name's boxes: the first of the ``spans``.
    """

    names: Sequence[str]
    dims: Sequence[int]
    which: Ints
    spans: Spans
    encoded: Sequence[bytes]


def numbered(name: str, numbers: Sequence[int], encoded: Sequence[bytes]) -> UnsortedRecords:
    """Return records of one name, whose boxes are single numbers."""
    low = np.array([numbers], dtype=np.int64)
    return UnsortedRecords(
        names=[name],
        dims=[1],
        which=np.zeros(len(numbers), dtype=np.int64),
        spans=Spans(low, low + 1),
        encoded=encoded,
    )


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
        self._number_of: dict[str, int] = {}
        self._dims: list[int] = []
        self._live: list[_Live] = []
        self._runs: dict[str, list[_WrittenRun]] = {}
        self._file: BinaryIO | None = None

    def add(self, records: UnsortedRecords) -> None:
        """Take some records. All boxes of a name have the same dims."""
        for name, dims in zip(records.names, records.dims, strict=True):
            if name not in self._number_of:
                self._number_of[name] = len(self._dims)
                self._dims.append(dims)
        numbers = np.array([self._number_of[name] for name in records.names], dtype=np.int64)
        self._live.append((numbers[records.which], records.spans, records.encoded))
        self._held += sum(map(len, records.encoded)) + _OVERHEAD_BYTES * len(records.encoded)
        if self._held >= self._run_bytes:
            self._write_out()

    def sorted(self) -> Iterator[SortedRecords]:
        """Yield the records, one name after the other."""
        live = dict(self._by_name())
        for name in sorted({*live, *self._runs}):
            parts = [self._read_back(written) for written in self._runs.pop(name, ())]
            yield _merged(name, [*parts, *([live.pop(name)] if name in live else [])])

    def close(self) -> None:
        """Remove the temporary file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _by_name(self) -> Iterator[tuple[str, _Part]]:
        """Yield the records in memory by name, and forget them."""
        live, self._live, self._held = self._live, [], 0
        if not live:
            return
        most = max(len(spans.lo) for _, spans, _ in live)
        lo = np.concatenate([_in_dims(spans.lo, most) for _, spans, _ in live], axis=1)
        hi = np.concatenate([_in_dims(spans.hi, most) for _, spans, _ in live], axis=1)
        number = np.concatenate([numbers for numbers, _, _ in live])
        encoded = list(chain.from_iterable(encoded for _, _, encoded in live))
        live.clear()
        order = np.argsort(number, kind="stable")
        number, lo, hi = number[order], lo[:, order], hi[:, order]
        encoded = [encoded[each] for each in order.tolist()]
        names = list(self._number_of)
        starts = np.flatnonzero(np.diff(number, prepend=-1)).tolist()
        for start, end in pairwise([*starts, len(encoded)]):
            own = int(number[start])
            dims = self._dims[own]
            yield names[own], (lo[:dims, start:end], hi[:dims, start:end], encoded[start:end])

    def _write_out(self) -> None:
        """Append the records in memory to the temporary file."""
        with refusals(Path(tempfile.gettempdir()), "keep what a commit sorts in it"):
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="holdfast-register-")  # noqa: SIM115
            for name, (lo, hi, encoded) in self._by_name():
                sizes = np.array([*map(len, encoded)], dtype=np.int64)
                written = _WrittenRun(
                    at=self._file.tell(), count=len(sizes), dims=len(lo), nbytes=int(sizes.sum())
                )
                for column in (lo, hi, sizes):
                    self._file.write(column.tobytes())
                self._file.writelines(encoded)
                self._runs.setdefault(name, []).append(written)
            self._file.flush()

    def _read_back(self, written: _WrittenRun) -> _Part:
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


def _merged(name: str, parts: Sequence[_Part]) -> SortedRecords:
    lo, hi = (np.concatenate([part[side] for part in parts], axis=1) for side in (0, 1))
    encoded = list(chain.from_iterable(part[2] for part in parts))
    order = np.lexsort(lo[::-1]) if len(lo) else np.arange(len(encoded))
    return SortedRecords(
        name=name,
        spans=Spans(lo[:, order], hi[:, order]),
        encoded=[encoded[number] for number in order.tolist()],
    )


def _in_dims(corners: Ints, dims: int) -> Ints:
    """Return corners with further dims, which no one reads, up to ``dims``."""
    return np.pad(corners, ((0, dims - len(corners)), (0, 0)))
