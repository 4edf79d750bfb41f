"""Resharding and converting resume after a kill at any point, and keep their memory limit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from doubles.checkpoints import sample_arrays, write_checkpoint
from tree import HELPERS

DRIVER = HELPERS / "rewrite_driver.py"
MIB = 1 << 20
STATE_MIB = 512
MEMORY_MIB = 64
SLACK_MIB = 48
"""Memory of the process itself while it works: modules, threads' stacks, indexes."""


@pytest.mark.parametrize("how", ["reshard", "safetensors"])
def test_killed_anywhere_it_goes_on(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *killed, last = [json.loads(line) for line in done.stdout.splitlines()]
    total = sum(array.nbytes for array, _ in sample_arrays().values())
    assert len(killed) > 10
    assert all(run["status"] == -signal.SIGKILL for run in killed)
    assert (last["status"], last["visible"]) == (0, True)
    for run in (*killed, last):
        assert (run["after"], run["rest"]) == (True, []), run
        if run["visible"]:
            assert "not overwritten" in run["again"]
    taken = [run["again"] for run in killed if not run["visible"]]
    assert taken[0] == total
    assert taken == sorted(taken, reverse=True), "what was complete is not written again"
    assert taken[-1] < total / 2


def large_state(root: Path) -> None:
    rows = np.arange(64 * MIB // 16, dtype="<u4").reshape(-1, 1024)
    arrays = {f"model.layer{n}.weight": (rows + n, "int32") for n in range(STATE_MIB // 16)}
    write_checkpoint(root, arrays, world_size=4)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large") / "root"
    large_state(root)
    return root


def grown_mib(*words: str) -> float:
    """Run the command in a process of its own; return by how much its peak memory grew."""
    code = (
        "import re, sys\n"
        "import holdfast.ckpt.checkpoints.commit, holdfast.ckpt.convert.safetensors\n"
        "import holdfast.tools.commands.convert, holdfast.tools.commands.reshard\n"
        "from holdfast.tools.cli import main\n"
        "def peak():\n"
        "    status = open('/proc/self/status').read()\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', status)[1])\n"
        "before = peak(); done = main(sys.argv[1:]); print((peak() - before) / 1024)\n"
        "sys.exit(done)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return float(run.stdout.splitlines()[-1])


def test_memory_stays_in_its_bounds_however_large_the_state_is(large: Path, tmp_path: Path) -> None:
    resharded, out, back = (str(tmp_path / name) for name in ("resharded", "out", "back"))
    memory = ["--memory", f"{MEMORY_MIB}MiB"]
    limit = MEMORY_MIB + SLACK_MIB
    assert grown_mib("convert", str(large), out, "--to", "safetensors", *memory) < limit
    words = ["reshard", str(large), resharded, "--mesh", "dp=3"]
    assert grown_mib(*words, *memory) < limit
    assert grown_mib("convert", out, back, "--prefix", "model.", *memory) < limit
