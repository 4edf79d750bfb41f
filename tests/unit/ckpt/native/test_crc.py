"""Checksums of pieces combine to that of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.native import crc, isal


def test_the_known_answer_of_the_standard() -> None:
    assert isal.crc32c(b"123456789") == 0xE3069283
    assert crc.combine(isal.crc32c(b"1234"), isal.crc32c(b"56789"), 5) == 0xE3069283


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_runs_are_combined(first: bytes, second: bytes) -> None:
    found = crc.combine(isal.crc32c(first), isal.crc32c(second), len(second))
    assert found == isal.crc32c(first + second)


@pytest.mark.parametrize("power", [0, 1, 7, 18, 24])
def test_the_second_run_may_be_of_any_length(power: int) -> None:
    second = bytes(2**power - 1) + b"x"
    found = crc.combine(isal.crc32c(b"head"), isal.crc32c(second), len(second))
    assert found == isal.crc32c(b"head" + second)


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=8), st.integers(0, 2**32 - 1))
def test_any_cuts_give_the_whole(sizes: list[int], seed: int) -> None:
    data = np.random.default_rng(seed).bytes(sum(sizes))
    found = at = 0
    for size in sizes:
        found = crc.combine(found, isal.crc32c(data[at : at + size]), size)
        at += size
    assert found == isal.crc32c(data)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_blocks_give_the_whole(count: int, extra: int) -> None:
    nbytes = max(count * crc.BLOCK_BYTES + extra, 0)
    data = np.random.default_rng(count).bytes(nbytes)
    blocks = crc.block_checksums(isal.address_of(data), nbytes) if nbytes else []
    assert len(blocks) == -(-nbytes // crc.BLOCK_BYTES)
    assert crc.of_blocks(blocks, nbytes) == isal.crc32c(data)
    assert crc.from_bytes(crc.to_bytes(blocks)) == blocks


def test_checksums_are_stored_little_endian() -> None:
    assert crc.to_bytes([1, 0xE3069283]) == b"\x01\x00\x00\x00\x83\x92\x06\xe3"


def test_the_second_polynomial_tells_apart_what_the_first_cannot() -> None:
    """Chunks count as unchanged by both; a multiple of one generator is none of the other."""
    first = np.zeros(64, dtype=np.uint8)
    second = first.copy()
    second[:5] = list((1 | 0x82F63B78 << 1).to_bytes(5, "little"))  # the polynomial itself
    assert isal.crc32c(first.data) == isal.crc32c(second.data)
    ours = [isal.crc64_at(isal.address_of(each.data), 64) for each in (first, second)]
    assert ours[0] != ours[1]
