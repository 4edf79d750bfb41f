"""Checksums of a block by runs: their scope, the damage they detect, and equality of runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.native import crc, isal
from holdfast.ckpt.native.sums import (
    SUM_BYTES,
    CheckedBlock,
    checksums,
    same_runs,
    set_runs,
    sum_of_range,
    sums_of,
)

SIZES = st.one_of(
    st.integers(1, 300),
    st.integers(-2, 2).map(lambda off: SUM_BYTES + off),
    st.integers(1, 3 * SUM_BYTES + 5),
)


def block(nbytes: int, seed: int) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(nbytes))


@settings(max_examples=examples(60), deadline=None)
@given(size=SIZES, seed=st.integers(0, 9), data=st.data())
def test_one_pass_gives_the_checksums_of_runs_and_of_any_ranges(
    size: int, seed: int, data: st.DataObject
) -> None:
    bytes_ = block(size, seed)
    starts = data.draw(st.lists(st.integers(0, size), max_size=6))
    lengths = [data.draw(st.integers(0, size - at)) for at in starts]
    sums, ranges = checksums(
        bytes_, at=np.array(starts, dtype=np.int64), nbytes=np.array(lengths, dtype=np.int64)
    )
    assert sums.tolist() == crc.block_checksums(isal.address_of(bytes_), size)
    assert sums.tolist() == sums_of(bytes_).tolist()
    assert ranges.tolist() == [
        isal.crc32c(bytes_[at : at + nbytes]) for at, nbytes in zip(starts, lengths, strict=True)
    ]


@settings(max_examples=examples(60), deadline=None)
@given(size=SIZES, data=st.data())
def test_the_checksum_of_any_range_follows_from_the_sums(size: int, data: st.DataObject) -> None:
    bytes_ = block(size, 0)
    at = data.draw(st.integers(0, size))
    nbytes = data.draw(st.integers(0, size - at))
    assert sum_of_range(bytes_, sums_of(bytes_), at, nbytes) == isal.crc32c(
        bytes_[at : at + nbytes]
    )


@settings(max_examples=examples(60), deadline=None)
@given(size=SIZES, data=st.data())
def test_no_flipped_bit_is_given_out(size: int, data: st.DataObject) -> None:
    bytes_ = block(size, 0)
    sums = sums_of(bytes_)
    at = data.draw(st.integers(0, size - 1))
    nbytes = data.draw(st.integers(1, size - at))
    intact = CheckedBlock(bytes_, sums, origin="here")
    assert bytes(intact.take(at, nbytes)) == bytes(bytes_[at : at + nbytes])
    flipped = at + data.draw(st.integers(0, nbytes - 1))
    bytes_[flipped] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptError, match="here: bytes"):
        CheckedBlock(bytes_, sums, origin="here").take(at, nbytes)


@settings(max_examples=examples(40), deadline=None)
@given(cuts=st.lists(st.integers(0, 3 * SUM_BYTES + 7), max_size=8), flip=st.booleans())
def test_reading_on_through_a_block_checks_every_run(cuts: list[int], flip: bool) -> None:
    size = 3 * SUM_BYTES + 7
    bytes_ = block(size, 1)
    sums = sums_of(bytes_)
    if flip:
        bytes_[size - 1] ^= 4
    edges = sorted({0, *cuts, size})
    reader, read = CheckedBlock(bytes_, sums, origin="here"), bytearray()

    def read_on() -> None:
        for lo, hi in pairwise(edges):
            read.extend(reader.take(lo, hi - lo))

    if flip:
        with pytest.raises(CorruptError):
            read_on()
    else:
        read_on()
        assert read == bytes_


def test_a_part_of_the_sums_serves_a_part_of_the_block() -> None:
    bytes_ = block(4 * SUM_BYTES, 2)
    part = CheckedBlock(bytes_, sums_of(bytes_)[1:3], first=1, origin="here")
    assert part.take(SUM_BYTES + 5, SUM_BYTES) == bytes_[SUM_BYTES + 5 : 2 * SUM_BYTES + 5]
    with pytest.raises(CorruptError, match="outside"):
        part.take(0, 1)


@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.tuples(SIZES, SIZES),
    flips=st.lists(st.integers(0, 3 * SUM_BYTES), max_size=3),
)
def test_only_the_very_same_bytes_are_the_same(sizes: tuple[int, int], flips: list[int]) -> None:
    new, old = block(sizes[0], 3), block(sizes[1], 3)
    for at in flips:
        if at < len(new):
            new[at] ^= 1
    same = same_runs(new, sums_of(new), old, sums_of(old)).tolist()
    for run, is_same in enumerate(same):
        at = slice(run * SUM_BYTES, (run + 1) * SUM_BYTES)
        assert is_same == (new[at] == old[at])


def test_equal_checksums_are_not_taken_for_equal_bytes() -> None:
    old = block(3 * SUM_BYTES, 4)
    new = bytearray(old)
    sums = sums_of(old)
    new[SUM_BYTES + 9] ^= 1  # changed since its checksum was taken
    assert same_runs(new, sums, old, sums).tolist() == [True, False, True]


def test_set_runs_are_half_open() -> None:
    assert set_runs(np.array([True, True, False, True])) == [(0, 2), (3, 4)]
    assert set_runs(np.array([], dtype=np.bool_)) == []
