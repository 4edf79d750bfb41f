"""A plain job under torchrun with DCP is hurt, and its history says what that cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.cli import main

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "torchrun_dcp.py"
STEPS, SAVE_EVERY, STRIKE_BEHIND = 12, 5, 6
DEADLINE_S = 90.0


def torchrun(directory: Path, *words: str) -> subprocess.Popen[bytes]:
    directory.mkdir()
    env = {**os.environ, "HOLDFAST_HISTORY": str(directory / "history"), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # shared, gloo meets addresses of the dead
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("--max-restarts=3", "--monitor-interval=0.1", str(EXAMPLE)),
        *(f"--root={directory / 'checkpoints'}", f"--steps={STEPS}", *words),
    ]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(argv, env=env, stdout=log, stderr=log)


def worker_behind(directory: Path, step: int) -> int:
    """Return the process id of rank 1 once it completed the step."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        for file in (directory / "history").glob("*.jsonl"):
            told = [json.loads(line) for line in file.read_text().splitlines(keepends=True)[:-1]]
            if any(e["rank"] == 1 and e["kind"] == "step" and e["step"] >= step for e in told):
                return int(file.name.split("-")[-2])
        time.sleep(0.02)
    raise AssertionError((directory / "log").read_text())


def judged(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> dict[str, Any]:
    status = main(["chaos", "check", *words, "--json"])
    verdict: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if verdict["held"] else 1)
    return verdict


def test_a_plain_job_repeats_steps_and_loses_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm, hurt = tmp_path / "calm", tmp_path / "hurt"
    jobs = torchrun(calm), torchrun(hurt, "--step-s=0.2")
    os.kill(worker_behind(hurt, STRIKE_BEHIND), signal.SIGKILL)
    for job, directory in zip(jobs, (calm, hurt), strict=True):
        assert job.wait(DEADLINE_S) == 0, (directory / "log").read_text()

    verdict = judged(capsys, [str(calm / "history")])
    assert verdict["held"], verdict["violations"]
    assert (verdict["attempts"], verdict["steps"], verdict["undone"]) == (1, STEPS, 0)

    verdict = judged(
        capsys, [str(hurt / "history"), "--against", str(calm / "history"), "--undone-most", "0"]
    )
    broken = {each["check"]: each["message"] for each in verdict["violations"]}
    assert verdict["attempts"] > 1
    assert verdict["steps"] == STEPS
    assert verdict["undone"] >= STRIKE_BEHIND - SAVE_EVERY
    assert {"bounded loss", "samples once", "samples of the reference"} <= broken.keys()
    assert f"step {SAVE_EVERY} has 8 others and lacks 8" in broken["samples of the reference"]
    assert "state of the reference" in broken
    assert {"no step skipped", "one attempt at a time"} & broken.keys() == set()


def test_the_verdict_is_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"t": 1.0 + step, "kind": "step", "step": step, "rank": 0, "attempt": 0}
        for step in (0, 1, 3)
    ]
    file = tmp_path / "history-here-1-a.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["chaos", "check", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "✕ no step skipped" in shown
    assert "step 1 of attempt 0 is followed by step 3" in shown
    assert "✓ one attempt at a time" in shown
    assert "– samples once: not told" in shown
    assert "3 steps survive, of 3 that were trained in 1 attempts" in shown
