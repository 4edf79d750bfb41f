"""Files written around the page cache have the given bytes on any kind of disk."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store import direct
from holdfast.ckpt.store.direct import BUFFER_BYTES
from holdfast.ckpt.store.local import DirectStore

SIZES = (0, 1, 4096, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 2 * BUFFER_BYTES + 5000)


def parts_of(data: bytes) -> Iterator[bytes]:
    at, lengths = 0, random.Random(7)
    while at < len(data):
        size = lengths.choice((1, 63, 4096, 1 << 20, 3 * BUFFER_BYTES))
        yield data[at : at + size]
        at += size


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read_again(tmp_path: Path, size: int) -> None:
    data, store = random.Random(size).randbytes(size), DirectStore(tmp_path)
    assert store.write("file", parts_of(data)) == size
    assert store.read("file") == data


def test_a_file_system_that_refuses_is_written_by_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def refuse(fd: int, view: Any) -> int:
        if direct.fcntl.fcntl(fd, direct.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, view)

    monkeypatch.setattr(direct.os, "write", refuse)
    data = random.Random(1).randbytes(2 * BUFFER_BYTES + 7)
    DirectStore(tmp_path).write("file", [data])
    assert (tmp_path / "file").read_bytes() == data


def test_short_writes_are_gone_on_with_at_any_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, lengths = os.write, random.Random(3)

    def some(fd: int, view: Any) -> int:
        is_direct = direct.fcntl.fcntl(fd, direct.fcntl.F_GETFL) & os.O_DIRECT
        length = max(len(view) // 2 // 4096 * 4096, 4096) if is_direct else len(view) // 2 + 1
        found = write(fd, view[:length])
        if is_direct and lengths.random() < 0.5:
            os.lseek(fd, -512, os.SEEK_CUR)
            return found - 512
        return found

    monkeypatch.setattr(direct.os, "write", some)
    data = random.Random(2).randbytes(3 * BUFFER_BYTES + 7)
    DirectStore(tmp_path).write("file", [data])
    assert (tmp_path / "file").read_bytes() == data


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _view: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct.os, "write", full)
    with pytest.raises(StoreError, match="No space left on device; make room there"):
        DirectStore(tmp_path).write("file", [bytes(BUFFER_BYTES + 1)])
    assert list(tmp_path.iterdir()) == []
