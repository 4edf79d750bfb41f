"""The note of a sidecar to its successor: whole, the newest, and without growth."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.ckpt.sidecar.core.durable_note import RESERVE_BYTES, Note


def test_nothing_is_read_where_nothing_was_written(tmp_path: Path) -> None:
    assert Note(tmp_path, "worlds").read() is None


def test_the_newest_text_is_read_by_who_comes_next(tmp_path: Path) -> None:
    note = Note(tmp_path, "worlds")
    for text in (b"one", b"", b"three and more", b"4"):
        note.write(text)
        assert note.read() == text
        assert Note(tmp_path, "worlds").read() == text


def test_numbers_go_on_where_the_one_before_ended(tmp_path: Path) -> None:
    for number in range(5):
        Note(tmp_path, "worlds").write(b"%d" % number)
    assert Note(tmp_path, "worlds").read() == b"4"


@pytest.mark.parametrize("at", [0, 5, 15, 21])
def test_a_text_that_was_half_written_leaves_the_one_before(tmp_path: Path, at: int) -> None:
    note = Note(tmp_path, "worlds")
    note.write(b"before")
    old = {path: path.read_bytes() for path in tmp_path.iterdir()}
    note.write(b"after")
    (newest,) = (path for path, data in old.items() if path.read_bytes() != data)
    data = bytearray(newest.read_bytes())
    data[at] ^= 1
    newest.write_bytes(data)
    assert Note(tmp_path, "worlds").read() == b"before"


def test_a_full_file_system_refuses_only_what_outgrows_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = Note(tmp_path, "worlds")
    note.write(b"before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    files = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    for number in range(4):
        note.write(b"x" * (RESERVE_BYTES // 2 + number))
    with pytest.raises(OSError, match="No space left"):
        note.write(bytes(RESERVE_BYTES))
    assert note.read() == b"x" * (RESERVE_BYTES // 2 + 3)
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == files
