"""Combinations over GF(256) in one pass, with the checksum of each run."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np
import pytest

from holdfast.ckpt.native import isal, mixed

pytestmark = pytest.mark.skipif(mixed.kernel() is None, reason="not compiled, or another processor")

SIZE = 3_001


def by_isal(coefficients: isal.Bytes, sources: list[isal.Bytes]) -> isal.Bytes:
    outputs, inputs = coefficients.shape
    made = np.zeros((outputs, SIZE), dtype=np.uint8)
    tables = isal.encode_tables(coefficients)
    isal.library().ec_encode_data(
        SIZE,
        inputs,
        outputs,
        int(tables.ctypes.data),
        (ctypes.c_void_p * inputs)(*(int(each.ctypes.data) for each in sources)),
        (ctypes.c_void_p * outputs)(*(int(row.ctypes.data) for row in made)),
    )
    return made


@pytest.mark.parametrize("inputs", [1, 4, 5, mixed.most_inputs()])
@pytest.mark.parametrize("shifts", [(0,), (64, 0), (1, 40), (3, 3, 67), tuple(range(11))])
def test_every_output_is_the_one_of_isal_and_checksummed(
    inputs: int, shifts: tuple[int, ...]
) -> None:
    rng = np.random.default_rng([inputs, *shifts])
    sources = [rng.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(inputs)]
    coefficients = rng.integers(0, 256, (len(shifts), inputs), dtype=np.uint8)
    rooms = [np.full(SIZE + 80, 7, dtype=np.uint8) for _ in shifts]
    stops = np.array([3, 3, 70, 1_000, 2_049, SIZE - 5])
    sums = mixed.combine_runs(
        coefficients,
        [int(each.ctypes.data) for each in sources],
        [int(room.ctypes.data) + shift for room, shift in zip(rooms, shifts, strict=True)],
        stops,
    )
    for row, wanted in enumerate(by_isal(coefficients, sources)):
        made = rooms[row][shifts[row] :]
        assert (made[3 : SIZE - 5] == wanted[3 : SIZE - 5]).all()
        assert set(rooms[row][: shifts[row] + 3].tolist()) | set(made[SIZE - 5 :].tolist()) == {7}
        assert sums[row].tolist() == [
            isal.crc32c(wanted[lo:hi].tobytes()) for lo, hi in pairwise(stops.tolist())
        ]


def test_every_coefficient_multiplies_every_byte() -> None:
    values = np.arange(256, dtype=np.uint8)
    source = np.resize(values, SIZE)
    made = np.zeros((256, SIZE), dtype=np.uint8)
    mixed.combine_runs(
        values.reshape(-1, 1),
        [int(source.ctypes.data)],
        [int(row.ctypes.data) for row in made],
        np.array([0, SIZE]),
    )
    assert (made == by_isal(values.reshape(-1, 1), [source])).all()


@pytest.mark.parametrize("inputs", [1, 3, mixed.most_inputs() + 1])
def test_coefficients_of_another_number_of_inputs_are_refused(inputs: int) -> None:
    room = np.zeros(8, dtype=np.uint8)
    sources = [int(room.ctypes.data)] * (inputs if inputs > 3 else 2)
    with pytest.raises(ValueError, match="coefficients of shape"):
        mixed.combine_runs(
            np.ones((1, inputs), dtype=np.uint8), sources, [int(room.ctypes.data)], np.array([0, 8])
        )
