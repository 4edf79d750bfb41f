"""Reading of a file with the checksums of its blocks in one call."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from holdfast.ckpt.native import checked_read, crc, isal

SIZE = 9 * crc.BLOCK_BYTES + 77

pytestmark = pytest.mark.skipif(checked_read.kernel() is None, reason="not compiled")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


@pytest.mark.parametrize("at", [0, 5, crc.BLOCK_BYTES, SIZE - 1, SIZE])
@pytest.mark.parametrize("beyond", [0, 1, crc.BLOCK_BYTES])
def test_bytes_and_checksums_are_those_of_the_file_up_to_its_end(
    file: Path, at: int, beyond: int
) -> None:
    room = bytearray(SIZE - at + beyond) or bytearray(1)
    fd = os.open(file, os.O_RDONLY)
    got, sums = checked_read.read_checked(fd, at, memoryview(room))
    os.close(fd)
    wanted = file.read_bytes()[at:]
    assert got == len(wanted)
    assert bytes(room[:got]) == wanted
    assert sums == [
        isal.crc32c(wanted[first : first + crc.BLOCK_BYTES])
        for first in range(0, got, crc.BLOCK_BYTES)
    ]


def test_an_error_of_the_system_is_an_error_here(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        checked_read.read_checked(folder, 0, memoryview(bytearray(10)))
    os.close(folder)
    with pytest.raises(OSError, match="Bad file descriptor"):
        checked_read.read_checked(folder, 0, memoryview(bytearray(10)))


def piece(
    at: int, size: int, first: int, last: int, rest: int, rooms: list[bytearray]
) -> list[int]:
    rooms += [bytearray(max(last - first, 1)), bytearray(max(rest, 1))]
    to, tail = (isal.address_of(room) for room in rooms[-2:])
    return [at, size, to, first, last, tail, rest]


needs_pieces = pytest.mark.skipif(checked_read.pieces_kernel() is None, reason="not compiled")


@needs_pieces
def test_pieces_arrive_where_they_are_wanted_with_the_checksums_of_all_their_blocks(
    file: Path,
) -> None:
    block, data, rooms = crc.BLOCK_BYTES, file.read_bytes(), list[bytearray]()
    wanted = [
        (0, 9 * block + 70, 0, 9 * block + 70, 7),
        (5, 7 * block, 0, 7 * block, 0),
        (5, 7 * block + 3, 1, 7 * block + 2, 68),
        (9, 2 * block, block - 1, block + 1, 0),
        (block, block, 17, 18, 3),
        (3, 40, 2, 2, 1),
        (4, 12, 0, 12, 64),
    ]
    rows = np.array([piece(*each, rooms) for each in wanted], dtype=np.int64)
    fd = os.open(file, os.O_RDONLY)
    sums, done, _ = checked_read.read_pieces(fd, rows)
    os.close(fd)
    assert done == len(rows)
    found, sums = iter(rooms), iter(sums.tolist())
    for at, size, first, last, rest in wanted:
        assert next(found)[: last - first] == data[at + first : at + last]
        assert next(found)[:rest] == data[at + size : at + size + rest]
        for lo in range(at, at + size, block):
            assert next(sums) == isal.crc32c(data[lo : min(lo + block, at + size)])
    assert next(sums, None) is None


@needs_pieces
@pytest.mark.parametrize(
    ("at", "size", "rest", "got"),
    [(SIZE - 9, 10, 0, 9), (SIZE - 9, 9, 4, 9), (SIZE - 9, 5, 10, 9), (SIZE, 3, 0, 0)],
)
def test_the_piece_at_which_the_file_ends_is_named_with_what_there_is_of_it(
    file: Path, at: int, size: int, rest: int, got: int
) -> None:
    rooms: list[bytearray] = []
    whole = piece(0, 10, 0, 10, 0, rooms)
    rows = np.array([whole, piece(at, size, 0, size, rest, rooms), whole], dtype=np.int64)
    fd = os.open(file, os.O_RDONLY)
    assert checked_read.read_pieces(fd, rows)[1:] == (1, got)
    os.close(fd)


@needs_pieces
def test_an_error_of_the_system_in_pieces_is_an_error_here(tmp_path: Path) -> None:
    rooms: list[bytearray] = []
    rows = np.array([piece(0, 10, 0, 10, 0, rooms)], dtype=np.int64)
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        checked_read.read_pieces(folder, rows)
    os.close(folder)


@needs_pieces
@pytest.mark.parametrize(
    ("field", "value"), [("size", -1), ("size", 3), ("first", 8), ("last", 11), ("rest", -1)]
)
def test_pieces_that_cannot_be_are_refused_before_anything_is_read(
    file: Path, field: str, value: int
) -> None:
    rooms: list[bytearray] = []
    rows = np.array([piece(0, 10, 2, 7, 4, rooms)] * 2, dtype=np.int64)
    rows[1, checked_read.FIELDS.index(field)] = value
    with file.open("rb") as opened, pytest.raises(ValueError, match="a piece has"):
        checked_read.read_pieces(opened.fileno(), rows)
    assert not any(map(any, rooms))
