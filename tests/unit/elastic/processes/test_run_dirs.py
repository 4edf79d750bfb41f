"""Temporary run directories: one that is in use or belongs to a user is never removed."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

import pytest

from holdfast.ckpt.memory.arena import ARENA_ROOT
from holdfast.ckpt.private import PRIVATE
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.processes import run_dirs


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def made(*, marked: bool = True) -> Path:
    directory = run_dirs.make()
    (directory / run_dirs.LOCK).touch()
    if marked:
        run_dirs.mark(directory)
    return directory


def test_what_a_killed_launcher_left_is_removed() -> None:
    left = made()
    (left / "logs").mkdir()
    (left / "logs" / "sidecar-a.log").write_text("the end")
    run_dirs.sweep()
    assert not left.exists()


def test_without_a_place_for_temporary_files_there_is_nothing_to_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_dirs.environment(tmp_path) == {}

    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    run_dirs.sweep()
    assert run_dirs.temporary_place() == ARENA_ROOT
    own = Path(run_dirs.environment(tmp_path)["TMPDIR"])
    assert own.parent == tmp_path and own.stat().st_mode & 0o777 == PRIVATE
    assert run_dirs.environment(tmp_path) == {"TMPDIR": str(own)}
    with pytest.raises(ConfigError, match="set TMPDIR, or give --run-dir DIR"):
        run_dirs.make()


def test_what_is_in_use_stays() -> None:
    used = made()
    with (used / run_dirs.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_dirs.sweep()
        assert used.exists()
    run_dirs.sweep()
    assert not used.exists()


def test_a_directory_that_somebody_chose_stays(root: Path) -> None:
    own = root / "holdfast-results"
    own.mkdir()
    (own / run_dirs.LOCK).touch()
    not_yet = made(marked=False)
    run_dirs.sweep()
    assert own.exists()
    assert not_yet.exists()


def test_a_directory_that_others_can_write_to_is_left(tmp_path: Path) -> None:
    prepared = run_dirs.make()
    (prepared / run_dirs.LOCK).symlink_to(tmp_path / "made")
    run_dirs.mark(prepared)
    prepared.chmod(0o777)
    run_dirs.sweep()
    assert prepared.exists()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("small", "large", "is_named", "chosen"),
    [
        (2 << 30, 8 << 30, False, "small"),
        (64 << 20, 8 << 30, False, "large"),
        (64 << 20, 32 << 20, False, "small"),
        (0, 8 << 30, True, "small"),
    ],
)
def test_a_small_place_gives_way_unless_the_user_named_it(
    small: int,
    large: int,
    is_named: bool,
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {tmp_path / "small": small, tmp_path / "large": large}
    for place in places:
        place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))
    monkeypatch.setattr(run_dirs, "_LARGE", tmp_path / "large")
    monkeypatch.setattr(run_dirs, "_free_bytes", lambda place: places[place])
    monkeypatch.delenv("TMPDIR", raising=False)
    if is_named:
        monkeypatch.setenv("TMPDIR", str(tmp_path / "small"))
    left = made()
    assert left.parent.name == chosen
    run_dirs.sweep()
    assert not left.exists()


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    monkeypatch.setattr(tempfile, "tempdir", str(gone))
    monkeypatch.setattr(run_dirs, "_LARGE", gone)
    with pytest.raises(ConfigError, match="give --run-dir DIR"):
        run_dirs.make()
