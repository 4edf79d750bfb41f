"""A crowd without a key at the port of a launcher with few descriptors: its job does not notice."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from crowd import Crowd
from listening import listening
from torchruns import DEADLINE_S

from holdfast.ckpt.descriptors import allow_many
from holdfast.elastic.agent.reporting import read_all_processes

TINY = Path(__file__).parents[1] / "helpers" / "tiny_training.py"
CROWD = 2000
FEW = 1024
STEPS = 40
MORE_BYTES = 64 << 20


def resident_bytes(pid: int) -> int:
    words = Path(f"/proc/{pid}/statm").read_text().split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_crowd_at_a_launcher_costs_its_job_nothing(tmp_path: Path) -> None:
    allow_many()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < CROWD + 200:
        pytest.skip(f"this process may not open {CROWD} connections (ulimit -n)")
    run_dir, until, result = tmp_path / "run", tmp_path / "until", tmp_path / "result.json"
    command = [
        *("sh", "-c", f'ulimit -n {FEW}; exec "$@"', "sh"),
        *(sys.executable, "-m", "holdfast.tools.cli", "run", "--run-dir", run_dir),
        *("--return-s", "0", "--nodes", "2", "--nproc", "1", TINY, "--result", result),
        *("--steps", STEPS, "--pace", "0.25", "--until", until),
    ]
    log = (tmp_path / "log").open("wb")
    with subprocess.Popen([str(word) for word in command], stdout=log, stderr=log) as launcher:
        try:
            await_protected(run_dir, 2, launcher)
            ((_, port),) = listening({launcher.pid})
            before, most = resident_bytes(launcher.pid), 0
            with Crowd(port, size=CROWD) as crowd:
                began = progress(run_dir)
                while progress(run_dir) < began + 12:
                    assert launcher.poll() is None, (tmp_path / "log").read_text()
                    most = max(most, resident_bytes(launcher.pid))
                    assert len([*Path(f"/proc/{launcher.pid}/fd").iterdir()]) < FEW
                    time.sleep(0.02)
                assert crowd.made > 100
                until.touch()
                assert launcher.wait(DEADLINE_S) == 0, (tmp_path / "log").read_text()
        finally:
            launcher.kill()
    assert most - before < MORE_BYTES
    assert json.loads(result.read_text())["steps"] == STEPS
    events = [json.loads(line) for file in run_dir.glob("events-*.jsonl") for line in file.open()]
    assert sum(event["kind"] == "proposed" for event in events) == 1, "no generation but the first"


def progress(run_dir: Path) -> int:
    """Return how far the node that is least far has come, in protected steps."""
    return min((node.progress for node in read_all_processes(run_dir).values()), default=-1)


def await_protected(run_dir: Path, step: int, launcher: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while progress(run_dir) < step:
        assert launcher.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
