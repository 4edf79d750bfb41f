"""A saver killed between any two calls to the system leaves the old checkpoint or the new one."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.catalog import committed_steps, open_store
from ckpt.testing.checkpoints import sample_arrays, write_checkpoint
from ckpt.verify import faults

DRIVER = Path(__file__).with_name("crash_driver.py")
FILES = 2 * 2 + 2 + 2
"""Packs and indexes of two writers and of the merged cells, manifest, refs."""


@pytest.mark.parametrize("before", ["none", "old"])
def test_killed_anywhere_it_is_old_or_new(tmp_path: Path, before: str) -> None:
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path), before],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    *killed, last = runs
    assert len(killed) > 50
    assert all(run["status"] == -signal.SIGKILL for run in killed)
    assert last["finished"]
    assert last["found"] == 1
    old = 0 if before == "old" else None
    found = [run["found"] for run in killed]
    turn = found.index(1)
    assert set(found[:turn]) == {old}, "nothing of the new one shows before its commit"
    assert set(found[turn:]) == {1}, "nothing takes it back afterwards"
    for run in runs:
        assert (run["again"], run["damage"], run["rest"]) == (1, [], []), run
        assert run["files"] == FILES, run


def _limited(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.parametrize("limit", [0, 100, 1000])
def test_a_file_system_that_takes_no_more_is_a_clear_error(tmp_path: Path, limit: int) -> None:
    write_checkpoint(tmp_path, sample_arrays(0), step=1)
    code = (
        "import sys; from pathlib import Path; from ckpt.errors import StoreError\n"
        "from ckpt.testing.checkpoints import sample_arrays, write_checkpoint\n"
        "try: write_checkpoint(Path(sys.argv[1]), sample_arrays(1), step=2)\n"
        "except StoreError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        preexec_fn=lambda: _limited(limit),
    )
    assert str(tmp_path / "step-000000000002") in done.stdout
    assert "ulimit -f" in done.stdout
    assert committed_steps(tmp_path) == [1]
    assert list(faults(open_store(tmp_path), 1, deep=True)) == []
    assert list(tmp_path.rglob("*.tmp")) == []
