"""Records come back by name and sorted by box, however many runs were written out meanwhile."""

from __future__ import annotations

import random

import numpy as np
import pytest

from holdfast.ckpt.geometry.spans import Spans
from holdfast.ckpt.register.records import Corner
from holdfast.ckpt.register.runs import SortedRecords, SortedRuns, UnsortedRecords


def some_records() -> list[tuple[str, Corner, Corner, bytes]]:
    drawn = random.Random(5)
    found: list[tuple[str, Corner, Corner, bytes]] = [("scalar", (), (), b"only")]
    for name, dims in (("a", 1), ("b", 2), ("c", 3)):
        for number in range(50):
            low = tuple(drawn.randrange(1000) for _ in range(dims))
            high = tuple(n + drawn.randrange(1, 9) for n in low)
            found.append((name, low, high, f"{name}{number}".encode()))
    drawn.shuffle(found)
    return found


def unsorted(records: list[tuple[str, Corner, Corner, bytes]]) -> UnsortedRecords:
    names = sorted({name for name, *_ in records})
    dims = {name: len(low) for name, low, *_ in records}
    most = max(dims.values())
    lo, hi = (
        np.array([(*record[side], *(9,) * (most - len(record[side]))) for record in records]).T
        for side in (1, 2)
    )
    return UnsortedRecords(
        names=names,
        dims=[dims[name] for name in names],
        which=np.array([names.index(name) for name, *_ in records]),
        spans=Spans(lo, hi),
        encoded=[encoded for *_, encoded in records],
    )


def sorted_by(run_bytes: int) -> list[SortedRecords]:
    with SortedRuns(run_bytes=run_bytes) as runs:
        records = some_records()
        for at in range(0, len(records), 7):
            runs.add(unsorted(records[at : at + 7]))
        return list(runs.sorted())


@pytest.mark.parametrize("run_bytes", [1, 700, 10_000, 1 << 30])
def test_records_are_sorted_by_name_and_box(run_bytes: int) -> None:
    wanted = sorted(some_records(), key=lambda each: (each[0], each[1]))
    found = [
        (records.name, tuple(low), tuple(high), encoded)
        for records in sorted_by(run_bytes)
        for low, high, encoded in zip(
            records.spans.lo.T.tolist(), records.spans.hi.T.tolist(), records.encoded, strict=True
        )
    ]
    assert found == wanted


def test_the_corners_of_some_records_are_those_of_the_box_around_them() -> None:
    (records,) = [each for each in sorted_by(1 << 30) if each.name == "b"]
    low, high = records.corners(10, 20)
    boxes = [(a, b) for name, a, b, _ in some_records() if name == "b"]
    some = sorted(boxes)[10:20]
    assert low == tuple(min(a[dim] for a, _ in some) for dim in range(2))
    assert high == tuple(max(b[dim] for _, b in some) for dim in range(2))


def test_nothing_comes_of_nothing() -> None:
    with SortedRuns() as runs:
        assert list(runs.sorted()) == []
