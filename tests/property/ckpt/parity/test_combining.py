"""Combinations by a compiled pass are those of ISA-L, byte for byte, with the same checksums."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from exploring import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.ckpt.native import mixed, xored
from holdfast.ckpt.native.sums import Sums
from holdfast.ckpt.parity import combining

LENGTH = 1_000


@pytest.mark.skipif(mixed.kernel() is None, reason="not compiled, or another processor")
@settings(max_examples=examples(50), deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.integers(0, LENGTH), min_size=1, max_size=6),
    st.lists(st.integers(0, LENGTH), max_size=4).map(sorted),
    st.sampled_from([1, 2, 256]),
    st.booleans(),
    st.integers(0, 2**32),
)
@example(1, [1], [0], 1, False, 0)  # as many places to cut as pieces, not the same ones
@example(1, [LENGTH], [0] * (-(-LENGTH // 300) - 1), 1, False, 0)
def test_the_compiled_pass_makes_what_isal_makes(
    outputs: int, lengths: list[int], cuts: list[int], factors: int, asked: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sources = [rng.bytes(length) for length in lengths]
    coefficients = rng.integers(1, 1 + factors, (outputs, len(lengths))).astype(np.uint8)
    told: list[list[tuple[int, int]]] = []

    def made() -> tuple[list[bytes], Sums]:
        ranges: list[tuple[int, int]] = []
        told.append(ranges)
        rows = [bytearray(rng.bytes(LENGTH)) for _ in range(outputs)]
        with patch.object(combining, "PIECE_BYTES", 300):
            sums = combining.combine(
                coefficients,
                sources,
                rows,
                cuts=cuts,
                before=(lambda lo, hi: ranges.append((lo, hi))) if asked else None,
            )
        return [bytes(row) for row in rows], sums

    rows, sums = made()
    with patch.object(mixed, "kernel", lambda: None), patch.object(xored, "kernel", lambda: None):
        plain_rows, plain_sums = made()
    assert rows == plain_rows
    assert sums.tolist() == plain_sums.tolist()
    for ranges in told:  # every byte is asked for once, in order
        ends = [0, *(hi for _, hi in ranges)]
        assert [lo for lo, _ in ranges] == ends[:-1]
        assert ends[-1] == (LENGTH if asked else 0)
