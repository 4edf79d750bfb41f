"""The local store writes whole files or none, under any refusal of the system."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.ckpt.errors import CorruptError, NotFoundError, StoreError
from holdfast.ckpt.store.local import LocalStore


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    parts = [os.urandom(n) for n in (0, 1, 3000, 9 << 20, 7)]
    data = b"".join(parts)
    assert store.write("a/b/file", parts) == len(data)
    assert store.read("a/b/file") == data
    assert store.size("a/b/file") == len(data)
    assert store.names("a/b") == ["file"]
    file = store.open("a/b/file")
    one, two = bytearray(10), bytearray(20)
    assert file.read_into([one, two], 2990) == 30
    assert one + two == data[2990:3020]
    assert file.read_into([bytearray(8)], len(data) - 3) == 3
    file.close()


def test_thousands_of_small_parts(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    parts = [bytes([i % 256]) * (i % 5) for i in range(5000)]
    store.write("f", iter(parts))
    assert store.read("f") == b"".join(parts)


def test_a_file_is_created_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert store.replace("f", b"one", expected=None)
    assert not store.replace("f", b"two", expected=None)
    assert store.read("f") == b"one"
    assert listed(tmp_path) == ["f"]


def test_what_is_not_there(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert store.size("f") is None
    assert store.names("folder") == []
    store.delete(["f"])
    for action in (store.read, store.open):
        with pytest.raises(NotFoundError, match=f"{tmp_path}/f"):
            action("f")


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("f", [b"old"])

    def parts() -> Iterator[bytes]:
        yield b"new"
        raise KeyError("the source broke")

    with pytest.raises(KeyError):
        store.write("f", parts())
    assert store.read("f") == b"old"
    assert listed(tmp_path) == ["f"]


@pytest.mark.parametrize("call", ["writev", "fsync", "rename"])
@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EROFS, "can be written"),
        (errno.EACCES, "permissions"),
        (errno.EIO, "disk fails"),
    ],
)
def test_a_refusal_names_path_and_remedy_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, remedy: str
) -> None:
    store = LocalStore(tmp_path)
    store.write("f", [b"old"])

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StoreError, match=f"{tmp_path}/f: .*{remedy}"):
        store.write("f", [b"new"])
    monkeypatch.undo()
    assert store.read("f") == b"old"
    assert listed(tmp_path) == ["f"]


def test_a_file_in_place_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("I am a file")
    with pytest.raises(StoreError, match="is a file"):
        LocalStore(tmp_path / "root").write("step/data", [b"x"])


def test_what_a_dead_writer_left_is_swept_and_a_living_one_is_not(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / ".f.1-1.tmp").write_bytes(b"left by a killed process")

    def parts() -> Iterator[bytes]:
        yield b"slow"
        store.write("other", [b"quick"])

    store.write("f", parts())
    assert listed(tmp_path) == ["f", "other"]


def test_what_is_not_published_is_told_with_whether_its_writer_is_gone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    found = []

    def parts() -> Iterator[bytes]:
        left = tmp_path / "d" / ".g.1-1.tmp"
        left.write_bytes(b"left by a killed process")
        yield b"slow"
        found.extend(store.unpublished("d"))
        left.unlink()

    store.write("d/f", parts())
    assert [each.abandoned for each in found] == [False, True]
    assert "/d/.f." in found[0].where and found[1].where == str(tmp_path / "d" / ".g.1-1.tmp")
    assert store.unpublished("d") == store.unpublished("not there") == []


def test_what_the_disk_cannot_read_back_counts_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.write("file", [b"x" * 100])

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = store.open("file")
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CorruptError, match="load another step"):
        file.read_into([bytearray(10)], 0)
    file.close()
