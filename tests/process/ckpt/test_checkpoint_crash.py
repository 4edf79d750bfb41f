"""A saver killed between any two system calls leaves the old checkpoint or the new one."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doubles.checkpoints import sample_arrays, write_checkpoint
from tree import HELPERS, ROOT

from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.store.places import open_store

DRIVER = HELPERS / "crash_driver.py"
OLD, NEW = 0, 1


def drive(root: Path, scene: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(root), scene],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("scene", "old", "new"),
    [
        ("first", {}, {"1": NEW}),
        pytest.param("again", {"1": OLD}, {"1": NEW}, marks=pytest.mark.exhaustive),
        ("newer generation", {"1": OLD}, {"1": NEW}),
        pytest.param("with a register", {"1": OLD}, {"1": NEW}, marks=pytest.mark.exhaustive),
        pytest.param(
            "with a base",
            {"1": OLD, "2": OLD},
            {"1": OLD, "2": OLD, "3": NEW},
            marks=pytest.mark.exhaustive,
        ),
        ("over a base", {"1": OLD, "2": OLD}, {"1": NEW, "2": OLD}),
        ("prune", {"1": OLD, "2": OLD}, {"2": OLD}),
    ],
)
def test_killed_anywhere_it_is_old_or_new(
    tmp_path: Path, scene: str, old: dict[str, int], new: dict[str, int]
) -> None:
    runs = drive(tmp_path, scene)
    *killed, last = runs
    assert len(killed) > 10
    assert all(run["status"] == -signal.SIGKILL for run in killed)
    assert last["finished"]
    assert last["found"] == new
    found = [run["found"] for run in runs]
    turn = found.index(new)
    assert all(each == old for each in found[:turn]), "nothing shows before the commit"
    assert all(each == new for each in found[turn:]), "nothing takes it back afterwards"
    for run in runs:
        assert (run["again"], run["damage"], run["rest"]) == (new, [], []), run


def test_killed_at_any_time_processes_leave_old_or_new(tmp_path: Path) -> None:
    *killed, last = drive(tmp_path, "random")
    assert len({run["status"] for run in killed} | {0}) == 2
    for run in killed:
        assert run["found"] in ({"1": OLD}, {"1": NEW})
        assert run["damage"] == []
    assert last == {"finished": True, "damage": [], "again": {"1": OLD}}


def _limited(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.parametrize("limit", [0, 100, 1000])
def test_a_file_system_that_takes_no_more_is_a_clear_error(tmp_path: Path, limit: int) -> None:
    write_checkpoint(tmp_path, sample_arrays(0), step=1)
    code = (
        "import sys; from pathlib import Path; from holdfast.ckpt.errors import StoreError\n"
        f"sys.path.append({str(ROOT / 'tests')!r})\n"
        "from doubles.checkpoints import sample_arrays, write_checkpoint\n"
        "try: write_checkpoint(Path(sys.argv[1]), sample_arrays(1), step=2)\n"
        "except StoreError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
        preexec_fn=lambda: _limited(limit),
    )
    assert str(tmp_path / "step-000000000002") in done.stdout
    assert "ulimit -f" in done.stdout
    assert committed_steps(tmp_path) == [1]
    assert list(faults(open_store(tmp_path), 1, deep=True)) == []
    assert list(tmp_path.rglob("*.tmp")) == []
