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
