"""Directories appear complete or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.new_folder import NewFolder


def names(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_a_folder_is_seen_when_it_is_published(tmp_path: Path) -> None:
    with NewFolder(tmp_path / "deep/out", tag="a") as folder:
        folder.write("x/y", [b"one", b"", memoryview(b"two")])
        folder.append("x/y", b"!")
        assert folder.room("z", 3).read_bytes() == b"\0\0\0"
        assert not (tmp_path / "deep/out").exists()
        folder.publish()
    assert names(tmp_path) == ["deep", "deep/out", "deep/out/x", "deep/out/x/y", "deep/out/z"]
    assert (tmp_path / "deep/out/x/y").read_bytes() == b"onetwo!"


def test_a_folder_that_is_not_published_leaves_nothing(tmp_path: Path) -> None:
    with NewFolder(tmp_path / "out", tag="a") as folder:
        folder.write("x", [b"one"])
    with pytest.raises(KeyError), NewFolder(tmp_path / "out", tag="a") as folder:
        folder.write("x", [b"one"])
        raise KeyError
    folder.close()
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_there_is_never_written_over(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    with NewFolder(out, tag="a") as folder:
        {
            "file": out.touch,
            "folder": out.mkdir,
            "link": lambda: out.symlink_to(tmp_path / "nowhere"),
        }[kind]()
        with pytest.raises(StoreError, match="exists"):
            folder.publish()
        with pytest.raises(StoreError, match="exists"):
            NewFolder(out, tag="b")
    assert names(tmp_path) == ["out"]


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    with NewFolder(tmp_path / "out", tag="a") as first:
        first.write("x", [b"one"])
        with pytest.raises(StoreError, match="another process"):
            NewFolder(tmp_path / "out", tag="a")
        with NewFolder(tmp_path / "out", tag="b") as second:  # its own: not removed, not shared
            second.write("x", [b"two"])
        assert (first.path / "x").read_bytes() == b"one"
        first.publish()
    assert names(tmp_path) == ["out", "out/x"]


def killed(target: Path, tag: str) -> None:
    """Fill a folder in a process that is then killed."""
    script = f"""
import os, signal
from holdfast.ckpt.store.new_folder import NewFolder
NewFolder({str(target)!r}, tag={tag!r}).write("x", [b"one"])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL


def test_what_a_killed_writer_left_is_gone_on_with(tmp_path: Path) -> None:
    killed(tmp_path / "out", "a")
    assert len(names(tmp_path)) == 2
    with NewFolder(tmp_path / "out", tag="a") as folder:
        assert (folder.path / "x").read_bytes() == b"one"
        folder.publish()
    assert names(tmp_path) == ["out", "out/x"]


def test_what_a_killed_writer_left_of_something_else_is_removed(tmp_path: Path) -> None:
    killed(tmp_path / "out", "a")
    killed(tmp_path / "out.zarr", "a")
    (tmp_path / ".out.note").touch()
    with NewFolder(tmp_path / "out", tag="b") as folder:
        assert names(folder.path) == []
        folder.publish()
    assert ".out.a.partial" not in names(tmp_path)
    assert ".out.zarr.a.partial" in names(tmp_path)
    assert ".out.note" in names(tmp_path)


def test_interrupting_keeps_what_there_is_for_the_next(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        NewFolder(tmp_path / "out", tag="a") as folder,
    ):
        folder.write("x", [b"one"])
        raise KeyboardInterrupt
    with NewFolder(tmp_path / "out", tag="a") as folder:
        assert (folder.path / "x").exists()


def test_refusals_of_the_system_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file.*choose another place"):
        NewFolder(tmp_path / "file/out", tag="a")
    with pytest.raises(StoreError, match="directory of this machine"):
        NewFolder("s3://bucket/out", tag="a")
    with (
        NewFolder(tmp_path / "out", tag="a") as folder,
        pytest.raises(StoreError, match="too long"),
    ):
        folder.write("x" * 300, [b""])
    assert names(tmp_path) == ["file"]
