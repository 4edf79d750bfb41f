"""Two decorated functions in a script are two stages of one job, each restored by its own state."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from forked_scripts import ran
from jobs import DEADLINE_S, Job, hurt, job
from tree import HELPERS

SCRIPT = HELPERS / "staged_training.py"


def _hashes(out: Path) -> set[str]:
    return {json.loads(path.read_text())["hash"] for path in out.glob("end-*.json")}


@functools.cache
def _alone() -> str:
    """Return the weights of the run that nothing disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, str(SCRIPT), "--out", folder]
        ran(words, check=True)
        (found,) = _hashes(Path(folder))
        return found


def _log(out: Path) -> list[dict[str, Any]]:
    path = out / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def _await(out: Path, stage: int, step: int, *, ranks: int = 1) -> list[int]:
    """Wait until so many ranks have come to a step; return their processes."""
    until_s = time.monotonic() + DEADLINE_S
    while True:
        there = [e["pid"] for e in _log(out) if (e["stage"], e["step"]) == (stage, step)]
        if len(set(there)) >= ranks:
            return there
        assert time.monotonic() < until_s, _log(out)
        time.sleep(0.02)


def _open(out: Path, stage: int, step: int) -> None:
    (out / f"go-{stage}:{step}").touch()


def _begun(out: Path) -> int:
    """Return how often a rank has begun the first stage."""
    return sum((e["stage"], e["step"]) == (1, 0) for e in _log(out))


def _finish(running: Job, out: Path) -> None:
    outcome = running.finish()
    assert outcome.ok, outcome.message
    assert _hashes(out) == {_alone()}


def test_two_stages_follow_each_other_on_two_ranks(tmp_path: Path) -> None:
    with job(tmp_path, "--out", str(tmp_path), script=SCRIPT) as running:
        _finish(running, tmp_path)
    assert [e for e in running.events("worker_exited") if e["status"] != "exit status 0"] == []


def _kill_at(running: Job, out: Path, stage: int, step: int, seat: str) -> None:
    """Kill a worker when both have come to a gate, and open it once the other has noticed."""
    _await(out, stage, step, ranks=2)
    before = len(running.events("proposed"))
    hurt(running.worker(seat))
    if stage:
        running.await_event(lambda e: e["kind"] == "proposed" and e["generation"] > before)
    else:
        running.await_event(lambda e: e["kind"] == "worker_exited" and e["seat"] == seat)
    _open(out, stage, step)


def test_a_worker_may_die_in_a_stage_between_two_and_in_the_next(tmp_path: Path) -> None:
    gates = ["--gate", "1:2", "0:0", "2:2", "--join", "1:3", "2:0"]
    with job(tmp_path, "--out", str(tmp_path), *gates, script=SCRIPT) as running:
        _kill_at(running, tmp_path, 1, 2, "trainer/1")
        _kill_at(running, tmp_path, 0, 0, "trainer/1")
        _kill_at(running, tmp_path, 2, 2, "trainer/0")
        _finish(running, tmp_path)
    assert _begun(tmp_path) == 2, "a finished stage is not run again"
    died = [event["victim"] for event in running.events("detected") if event["what"] == "exit"]
    assert died == ["trainer/1", "trainer/1", "trainer/0"]


@pytest.mark.parametrize("step", [pytest.param(5, id="last"), pytest.param(0, id="first")])
@pytest.mark.exhaustive
def test_the_leader_may_die_at_the_ends_of_a_stage(tmp_path: Path, step: int) -> None:
    stage = 1 if step else 2
    with job(
        tmp_path, "--out", str(tmp_path), "--gate", f"{stage}:{step}", script=SCRIPT
    ) as running:
        _kill_at(running, tmp_path, stage, step, "trainer/0")
        _finish(running, tmp_path)
    assert _begun(tmp_path) == 2


@pytest.mark.exhaustive
def test_the_second_stage_outlives_a_node_and_the_whole_job(tmp_path: Path) -> None:
    root = ["--root", str(tmp_path / "root")]
    first, again = tmp_path / "first", tmp_path / "again"
    for out in (first, again):
        out.mkdir()
    gates = ["--gate", "2:1", "2:2"]
    with job(
        first, "--out", str(first), *root, *gates, nodes=2, per_node=1, script=SCRIPT
    ) as running:
        _await(first, 2, 1, ranks=2)
        assert running.launcher.lose_machine("n0")
        _open(first, 2, 1)
        _await(first, 2, 2)
        stage = running.await_event(
            lambda e: e["kind"] == "proposed" and "stage 1 of the script begins" in e["reason"]
        )
        running.await_event(
            lambda e: e["kind"] == "checkpoint_done" and e["time_s"] > stage["time_s"]
        )
        running.launcher.kill()
    assert _begun(first) == 2, "what is left of the job has the first stage's result"
    with job(again, "--out", str(again), *root, script=SCRIPT) as running:
        _finish(running, again)
    steps = {(e["stage"], e["step"]) for e in _log(again)} - {(0, 0)}
    assert steps <= {(2, 1), (2, 2), (2, 3)}, "neither stage began anew"


@pytest.mark.exhaustive
def test_a_stage_that_everyone_left_is_run_again_from_its_checkpoint(tmp_path: Path) -> None:
    with job(
        tmp_path, "--out", str(tmp_path), "--gate", "2:2", "--root", str(tmp_path / "root"),
        script=SCRIPT,
    ) as running:  # fmt: skip
        _await(tmp_path, 2, 2)
        for seat in ("trainer/0", "trainer/1"):
            hurt(running.worker(seat))
        _open(tmp_path, 2, 2)
        _finish(running, tmp_path)
    assert _begun(tmp_path) == 2, "its last checkpoint was restored"


def test_a_job_that_is_begun_again_skips_what_is_finished(tmp_path: Path) -> None:
    for out in (tmp_path / "first", tmp_path / "again"):
        out.mkdir()
        with job(out, "--out", str(out), "--root", str(tmp_path / "root"), script=SCRIPT) as going:
            _finish(going, out)
    assert {e["stage"] for e in _log(tmp_path / "again")} == {0}, "it only passes on"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--result", "module"], "the result is a Sequential"),
        (  # a rank that comes late would find the second stage over
            ["--result", "lead", "--join", "2:0"],
            "pretrain returned something else on rank 1 than on rank 0",
        ),
        pytest.param(
            ["--same", "--root", "root"], "give each its own", marks=pytest.mark.exhaustive
        ),
        (["--only-lead"], "call the same decorated functions on all ranks"),
    ],
)
def test_stages_that_cannot_follow_are_refused_by_name(
    tmp_path: Path, flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with job(tmp_path, "--out", str(tmp_path), *flags, script=SCRIPT) as running:
        outcome = running.finish()
    assert not outcome.ok
    assert said in outcome.message


@pytest.mark.slow
@pytest.mark.exhaustive
def test_stages_beside_a_sidecar_end_the_same_when_torchrun_restarts_everything(
    tmp_path: Path,
) -> None:
    """The memory holds the second stage, which the first must not restore."""
    file = tmp_path / "sidecar.json"
    sidecar = [sys.executable, "-m", "holdfast.tools.cli", "sidecar"]
    begin = ["start", "--run", tmp_path.name, "--node", "a", "--file", str(file)]
    begin += ["--key-file", str(tmp_path / "key.json")]
    subprocess.run([*sidecar, *begin], check=True, timeout=DEADLINE_S)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=2", "--max-restarts=1", str(SCRIPT), "--out", str(tmp_path)]
    env = {**os.environ, "HOLDFAST_SIDECAR": str(file), "OMP_NUM_THREADS": "1"}
    try:
        with subprocess.Popen([*torchrun, "--gate", "2:2"], env=env) as agent:
            _await(tmp_path, 2, 2)
            hurt(_log(tmp_path)[-1]["pid"])
            _open(tmp_path, 2, 2)
            assert agent.wait(2 * DEADLINE_S) == 0
    finally:
        subprocess.run([*sidecar, "stop", "--file", str(file)], check=True, timeout=DEADLINE_S)
    assert _hashes(tmp_path) == {_alone()}
