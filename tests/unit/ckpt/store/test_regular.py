"""Files that others put there are opened without waiting, and not read beyond a limit."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.ckpt.errors import CorruptError, NotFoundError, StoreError
from holdfast.ckpt.store.base import SMALL_FILE_BYTES
from holdfast.ckpt.store.local import LocalFile, LocalStore
from holdfast.ckpt.store.refusals import refusals, remedy_of
from holdfast.ckpt.store.regular import open_regular, opened, read_regular


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    assert read_regular(tmp_path / "f", most_bytes=5) == b"12345"
    with opened(tmp_path / "f") as file:
        assert file.read() == b"12345"
    fd, size = open_regular(tmp_path / "f")
    os.close(fd)
    assert size == 5


def test_pipes_devices_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path):
        for reader in (open_regular, LocalFile, lambda p: read_regular(p, most_bytes=9)):
            with pytest.raises(CorruptError, match="not a regular file"):
                reader(path)


def test_a_sparse_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.truncate(6 << 30)
    with pytest.raises(CorruptError, match=f"6442450944 bytes, .* at most {SMALL_FILE_BYTES}"):
        LocalStore(tmp_path).read("f")


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not there"):
        open_regular(tmp_path / "none")


@pytest.mark.parametrize(
    ("code", "reading", "writing"),
    [
        (errno.EACCES, "the right to read it", "choose a place that can be written"),
        (errno.ENAMETOOLONG, "choose a shorter path", "choose a shorter path"),
        (errno.ENOSPC, "see the system's message", "make room there"),
        (errno.EIO, "restore it from a copy", "choose another place"),
        (errno.EEXIST, "a file is in the way", "a file is in the way"),
        (errno.ELOOP, "links lead in a circle", "links lead in a circle"),
    ],
)
def test_a_remedy_fits_the_fault_and_the_work(code: int, reading: str, writing: str) -> None:
    error = OSError(code, os.strerror(code))
    assert reading in remedy_of(error, reading=True)
    assert writing in remedy_of(error)
    with (
        pytest.raises(StoreError, match=f"place: cannot write it: .*{writing}"),
        refusals(Path("place"), "write it"),
    ):
        raise error


def test_a_name_that_is_too_long_says_so(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for work in (lambda: store.read("n" * 300), lambda: store.write("n" * 300, [b""])):
        with pytest.raises(StoreError, match="File name too long; choose a shorter path"):
            work()
