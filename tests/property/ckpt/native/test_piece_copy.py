"""Checksums computed during a copy equal those of a separate pass."""

from __future__ import annotations

import numpy as np
import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.native import crc, isal, piece_copy, streaming
from holdfast.ckpt.native.piece_copy import PieceCopy

EDGES = [1, 7, 8, 63, 255, 256, 257, 511, 512, 513, 4096, 70_001]
AROUND_BLOCKS = [crc.BLOCK_BYTES + each for each in (-1, 0, 1, 255, 256, 257)]
ROOM = np.zeros(3 * crc.BLOCK_BYTES + 128, np.uint8)


@pytest.fixture(params=["compiled", "by passes"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by passes":
        monkeypatch.setattr(piece_copy, "kernel", lambda: None)
    elif piece_copy.kernel() is None:
        pytest.skip("the package was installed without a compiler, or for another processor")


@st.composite
def sizes(draw: st.DrawFn) -> list[int]:
    """Return the sizes of the single copies that make up a piece of up to three blocks."""
    found = draw(st.lists(st.sampled_from(EDGES + AROUND_BLOCKS), min_size=1, max_size=9))
    while sum(found) > 3 * crc.BLOCK_BYTES:
        found.pop()
    return found or [1]


@pytest.mark.usefixtures("way")
@settings(max_examples=examples(60), deadline=None)
@given(sizes=sizes(), shifts=st.tuples(st.integers(0, 63), st.integers(0, 63)), seed=st.integers(0))
def test_a_copy_in_steps_has_the_checksums_of_the_whole(
    sizes: list[int], shifts: tuple[int, int], seed: int
) -> None:
    nbytes, (before, shift) = sum(sizes), shifts
    source = np.frombuffer(np.random.default_rng(seed).bytes(nbytes + before), np.uint8)[before:]
    ROOM[:] = 7
    piece, at = PieceCopy(source.data), int(ROOM.ctypes.data) + shift
    for size in sizes:
        piece.pour(at, size)
        at += size
    assert (ROOM[shift : shift + nbytes] == source).all()
    assert (ROOM[:shift] == 7).all() and (ROOM[shift + nbytes :] == 7).all()
    blocks, whole = piece.sums()
    start = isal.address_of(source.data)
    assert blocks == crc.block_checksums(start, nbytes)
    assert whole == isal.crc64_at(start, nbytes)
    assert crc.of_blocks(blocks, nbytes) == isal.crc32c(source.data)


@pytest.mark.usefixtures("way")
def test_the_checksums_are_the_published_ones() -> None:
    piece = PieceCopy(memoryview(b"123456789"))
    piece.pour(int(ROOM.ctypes.data), 9)
    assert piece.sums() == ([0xE3069283], 0xAE8B14860A799888)


def test_more_than_there_is_and_checksums_of_a_part_are_refused() -> None:
    piece, at = PieceCopy(memoryview(b"123456789")), int(ROOM.ctypes.data)
    piece.pour(at, 4)
    with pytest.raises(ValueError, match="4 of 9 bytes"):
        piece.sums()
    with pytest.raises(ValueError, match="6 bytes are wanted, 5 are left"):
        piece.pour(at, 6)


def test_what_was_compiled_from_an_earlier_source_is_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "library", object)
    assert piece_copy.kernel.__wrapped__() is None
