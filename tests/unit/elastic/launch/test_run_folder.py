"""A run directory is private, locked by one job, and cleared of an earlier run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.launch.run_folder import KEY, clear_run_dir, lock_run_dir


def _others_write(run_dir: Path) -> None:
    run_dir.mkdir()
    run_dir.chmod(0o777)


def _lock_elsewhere(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    (run_dir / "lock").symlink_to(run_dir.parent / "theirs")


def _logs_elsewhere(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    (run_dir / "logs").symlink_to(run_dir.parent)


@pytest.mark.parametrize("prepare", [_others_write, _lock_elsewhere, _logs_elsewhere])
def test_a_run_directory_that_others_may_have_prepared_is_refused(
    prepare: Callable[[Path], None], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    prepare(run_dir)
    with pytest.raises(HoldfastError, match=str(run_dir)):
        lock_run_dir(run_dir, temporary=False)
    assert not (tmp_path / "theirs").exists()


def test_a_run_directory_is_for_one_job_at_a_time(tmp_path: Path) -> None:
    with (
        lock_run_dir(tmp_path / "run", temporary=False),
        pytest.raises(ConfigError, match="another job uses it; choose another directory"),
    ):
        lock_run_dir(tmp_path / "run", temporary=False)
    lock_run_dir(tmp_path / "run", temporary=False).close()


def test_the_files_of_an_earlier_run_are_removed_and_logs_stay(tmp_path: Path) -> None:
    for name in (KEY, "events-n0.jsonl", "processes-n0.json", "notes.txt"):
        (tmp_path / name).write_text("old")
    clear_run_dir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
