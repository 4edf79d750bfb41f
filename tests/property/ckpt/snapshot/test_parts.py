"""Checksums of parts give those of any ranges and runs."""

from __future__ import annotations

import numpy as np
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.sums import SUM_BYTES, sums_of
from holdfast.ckpt.snapshot.run_cuts import Cover, OrderedRanges

GAPS = st.integers(0, 200) | st.integers(SUM_BYTES - 3, SUM_BYTES + 3)
SIZES = st.integers(1, 300) | st.integers(SUM_BYTES - 2, 2 * SUM_BYTES + 2)


@settings(max_examples=examples(150), deadline=None)
@given(
    ranges=st.lists(st.tuples(GAPS, SIZES), max_size=8),
    end=GAPS,
    tail=st.binary(max_size=40) | st.just(b"index" * 40_000),
    seed=st.integers(0, 2**32),
)
def test_parts_speak_for_ranges_and_runs(
    ranges: list[tuple[int, int]], end: int, tail: bytes, seed: int
) -> None:
    gaps, sizes = [gap for gap, _ in ranges], [size for _, size in ranges]
    ats = np.cumsum(gaps) + np.cumsum([0, *sizes])[:-1] if ranges else np.empty(0)
    payload = int(sum(gaps) + sum(sizes) + end)
    at, nbytes = ats.astype(np.int64), np.array(sizes, dtype=np.int64)
    block = np.zeros(payload, np.uint8)
    rng = np.random.default_rng(seed)
    for low, size in zip(at, nbytes, strict=True):
        block[low : low + size] = rng.integers(0, 256, size, dtype=np.uint8)
    parts = OrderedRanges.of(at, nbytes)
    data = block.tobytes()
    sums = np.array(
        [crc32c(data[a : a + n]) for a, n in zip(parts.at, parts.nbytes, strict=True)], np.uint32
    )
    wanted = [crc32c(data[a : a + n]) for a, n in zip(at, nbytes, strict=True)]
    assert parts.of_ranges(sums).tolist() == wanted
    cover = Cover.of(parts, payload)
    assert cover.of_runs(sums, tail=tail).tolist() == sums_of(data + tail).tolist()
    covered = np.zeros(payload, np.int8)
    covered[cover.gaps] += 1
    for low, size in zip(parts.at, parts.nbytes, strict=True):
        assert low // SUM_BYTES == (low + size - 1) // SUM_BYTES
        covered[low : low + size] += 1
    assert (covered == 1).all()
