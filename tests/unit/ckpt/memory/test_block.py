"""The checks of a sealed block when its writer supplies the checksums."""

from __future__ import annotations

import numpy as np
import pytest
from doubles.blocks import make_block, random_payload

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.memory.block import block_bytes, check_block, check_sealed
from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.native.crc import to_bytes
from holdfast.ckpt.native.sums import SUM_BYTES

RUNS = 80


def sealed() -> tuple[BlockEntry, bytearray, bytes]:
    entry, block = make_block(random_payload(RUNS * SUM_BYTES, seed=(7,)))
    return entry, bytearray(block), to_bytes(check_block(memoryview(block), entry, origin="x").sums)


def test_the_writers_sums_are_taken_over() -> None:
    entry, block, data = sealed()
    found = check_sealed(memoryview(block), entry, data, turn=3, origin="slot")
    assert to_bytes(found) == data
    assert found.dtype == np.uint32


@pytest.mark.parametrize("length", [0, 3, -4, 4])
def test_sums_of_another_length_are_refused(length: int) -> None:
    entry, block, data = sealed()
    wrong = (data + bytes(8))[: len(data) + length] if length else b""
    with pytest.raises(CorruptError, match=r"slot: .* bytes of checksums came for a block"):
        check_sealed(memoryview(block), entry, wrong, turn=0, origin="slot")


def test_an_index_that_is_not_the_one_said_is_refused() -> None:
    entry, block, data = sealed()
    block[block_bytes(entry) - 3] ^= 1
    with pytest.raises(CorruptError, match="index"):
        check_sealed(memoryview(block), entry, data, turn=0, origin="slot")


def test_a_changed_byte_is_found_within_as_many_turns_as_runs_are_skipped() -> None:
    entry, block, data = sealed()
    block[37 * SUM_BYTES + 5] ^= 1
    failed = []
    for turn in range(64):
        try:
            check_sealed(memoryview(block), entry, data, turn=turn, origin="slot")
        except CorruptError:
            failed.append(turn)
    assert failed == [37]
