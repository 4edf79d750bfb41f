"""A run directory is followed: new events, bounded reads, damaged lines, no job at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from large_run import training, write

from holdfast.ckpt.errors import NotFoundError
from holdfast.tools.live import directories
from holdfast.tools.live.follow import Follower


def test_what_appears_is_read_once(tmp_path: Path) -> None:
    count = write(tmp_path, training(3, steps=20))
    follower = Follower(tmp_path)
    assert (follower.read(), follower.read()) == (count, 0)
    assert follower.view().step == 20


def test_large_files_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(directories, "_LEAST_BYTES", 1000)
    count = write(tmp_path, training(2, steps=50))
    follower = Follower(tmp_path)
    parts = []
    while part := follower.read():
        parts.append(part)
    assert sum(parts) == count
    assert len(parts) > 10


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    count = write(tmp_path, training(2, steps=5))
    with (tmp_path / "events-node0.jsonl").open("ab") as file:
        file.write(b"no event\n\xff\xfe\n{}\n")
    follower = Follower(tmp_path)
    assert follower.read() == count
    assert follower.view().damaged == 3


def test_nothing_is_written_into_the_run(tmp_path: Path) -> None:
    write(tmp_path, training(2, steps=5))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    follower = Follower(tmp_path)
    follower.read()
    follower.ask()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert "no job was started here" in follower.silence


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no run has written events here"):
        Follower(tmp_path)
    with pytest.raises(NotFoundError, match="no such directory"):
        Follower(tmp_path / "nowhere")
