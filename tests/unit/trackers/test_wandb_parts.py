"""Records of wandb's offline files are found across blocks; a torn end is left out."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.adapters.trackers.wandb_parts import records

BLOCK, HEADER = 32768, 7


def written(contents: list[bytes]) -> bytes:
    """Write records in LevelDB's log format, behind a header of seven bytes."""
    out = bytearray(b":W&B\0\0\0")
    for data in contents:
        at = 0
        while at < len(data):
            if (left := BLOCK - len(out) % BLOCK) < HEADER:
                out += bytes(left)
                continue
            piece = data[at : at + left - HEADER]
            ends = at + len(piece) == len(data)
            kind = (4 if at else 1) if ends else (3 if at else 2)
            out += struct.pack("<IHB", 0, len(piece), kind) + piece
            at += len(piece)
    return bytes(out)


sizes = st.integers(1, 40) | st.integers(BLOCK - 60, BLOCK + 60) | st.integers(1, 100_000)


@given(st.lists(sizes, max_size=6))
def test_all_records_are_found(lengths: list[int]) -> None:
    contents = [bytes([number % 256]) * length for number, length in enumerate(lengths)]
    assert list(records(written(contents))) == contents


@pytest.mark.parametrize("torn", [1, 8, 40_000])
def test_a_torn_record_is_left_out(torn: int) -> None:
    contents = [b"a" * 10, b"b" * 50_000]
    assert list(records(written(contents)[:-torn])) == contents[:1]
