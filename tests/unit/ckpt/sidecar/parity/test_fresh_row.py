"""A row made of arriving columns, in any order, over whatever was in its memory before."""

from __future__ import annotations

import random

import numpy as np
import pytest

from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.parity.erasure import ErasureCode
from holdfast.ckpt.sidecar.core.wire import PART_BYTES
from holdfast.ckpt.sidecar.parity.changes import batches
from holdfast.ckpt.sidecar.parity.fresh_row import FreshRow

START = 1_000


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(
    "filled",
    [
        (2 * PART_BYTES + 5, PART_BYTES + 700_000),
        (START + 1, 3 * PART_BYTES),
        (PART_BYTES // 2, PART_BYTES // 2),
    ],
)
def test_parts_in_any_order_make_the_row_that_one_pass_makes(
    m: int, filled: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(m)
    columns = [rng.bytes(nbytes) for nbytes in filled]
    nbytes = max(filled) + 100  # behind all columns there are zeros
    codec, number = ErasureCode(len(columns), m), m - 1
    wanted = bytearray(nbytes)
    codec.encode(columns, {number: wanted})
    parts = [
        (column, lo, hi)
        for column, size in enumerate(filled)
        for ((lo, hi),) in batches([(START, size)], PART_BYTES)
    ]
    random.Random(m).shuffle(parts)
    row = bytearray(rng.bytes(nbytes))
    before = bytes(row[:START])
    fresh = FreshRow(
        memoryview(row),
        start=START,
        cell_bytes=PART_BYTES,
        codec=codec,
        number=number,
        parts=[(column, lo) for column, lo, _ in parts],
    )
    for column, lo, hi in parts:
        fresh.add(column, lo, memoryview(columns[column])[lo:hi])
    assert row[:START] == before
    assert row[START:] == wanted[START:]
    assert fresh.checksum() == crc32c(wanted[START:])


@pytest.mark.parametrize(("lo", "nbytes"), [(START + 1, 10), (START, PART_BYTES + 1)])
def test_parts_that_fit_into_no_cell_are_refused(lo: int, nbytes: int) -> None:
    row = memoryview(bytearray(2 * PART_BYTES))
    with pytest.raises(ValueError, match="cell"):
        FreshRow(
            row,
            start=START,
            cell_bytes=PART_BYTES,
            codec=ErasureCode(2, 1),
            number=0,
            parts=[(0, lo)],
        ).add(0, lo, memoryview(bytes(nbytes)))
