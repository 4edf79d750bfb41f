"""The exclusive or of runs of memory, with the checksum of each run."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from holdfast.ckpt.native import isal, xored

pytestmark = pytest.mark.skipif(xored.kernel() is None, reason="not compiled, or another processor")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("shift", [0, 1, 40])
def test_every_run_is_the_exclusive_or_of_all_sources_and_checksummed(
    count: int, shift: int
) -> None:
    size = 300_001
    rng = np.random.default_rng([count, shift])
    sources = [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(count)]
    room = np.full(size + shift, 7, dtype=np.uint8)
    stops = np.array([3, 3, 70, 1_000, 131_072, size - 5])
    sums = xored.xor_runs(
        [int(each.ctypes.data) for each in sources], int(room.ctypes.data) + shift, stops
    )
    made = room[shift:]
    wanted = np.bitwise_xor.reduce(sources)
    assert (made[3 : size - 5] == wanted[3 : size - 5]).all()
    assert set(made[:3].tolist()) | set(made[size - 5 :].tolist()) == {7}
    assert sums.tolist() == [
        isal.crc32c(wanted[lo:hi].tobytes()) for lo, hi in pairwise(stops.tolist())
    ]


def test_a_target_may_be_one_of_the_sources() -> None:
    rng = np.random.default_rng(1)
    one, other = (rng.integers(0, 256, 4_099, dtype=np.uint8) for _ in range(2))
    wanted = one ^ other
    at = int(one.ctypes.data)
    xored.xor_runs([at, int(other.ctypes.data)], at, np.array([0, len(one)]))
    assert (one == wanted).all()
