"""`holdfast demo` as a user runs it: the verdict, the report, and a clean machine afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from event_lines import EventLines
from tree import ROOT

from holdfast.tools.leftovers import leftovers

DEADLINE_S = 240.0


def demo(report_dir: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "holdfast.tools.cli",
            "demo",
            "--report-dir",
            str(report_dir),
            *words,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, int]]:
    report_dir = tmp_path_factory.mktemp("demo") / "report"
    process = demo(report_dir, "--quick", "--steps", "20", "--keep-runs")
    try:
        out, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    yield report_dir, out, process.returncode


def read(report_dir: Path) -> dict[str, Any]:
    return msgspec.json.decode((report_dir / "report.json").read_bytes(), type=dict[str, Any])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_hurt_job_ends_with_the_undisturbed_jobs_weights(
    finished: tuple[Path, str, int],
) -> None:
    report_dir, out, status = finished
    assert status == 0, out
    report = read(report_dir)
    assert report["verdict"]["exact"] is True
    assert report["verdict"]["ledger_ok"] is True
    assert all(report["verdict"].values())
    assert report["final_hash"] == report["reference_hash"]
    assert len(report["reward"]) == report["steps"] == 20


@pytest.mark.timeout(300)
def test_all_three_kinds_of_kill_hit_and_were_recovered_from(
    finished: tuple[Path, str, int],
) -> None:
    report = read(finished[0])
    kinds = {fault["kind"] for fault in report["faults"]}
    assert kinds == {"kill_trainer", "kill_rollout", "kill_node"}
    assert all({"kind", "time", "victim"} <= fault.keys() for fault in report["faults"])
    keys = {"detect_s", "agree_s", "reform_s", "restore_s", "reexecute_s", "total_s", "steps_lost"}
    for recovery in report["recoveries"]:
        assert keys <= recovery.keys()
        assert 0.0 < recovery["total_s"] < DEADLINE_S
    how = {row["fault"]: row["restore_how"] for row in report["recoveries"]}
    assert how["kill_node"] == "parity"
    assert 0.0 < report["goodput"] < 1.0


@pytest.mark.timeout(300)
def test_the_page_is_written_and_the_runs_can_be_kept(finished: tuple[Path, str, int]) -> None:
    report_dir, out, _ = finished
    page = (report_dir / "report.html").read_text()
    assert "same weights to the last bit" in page
    assert str(report_dir / "report.html") in out
    logs = sorted(path.name for path in (report_dir / "runs" / "hurt" / "logs").iterdir())
    assert {"trainer-0.log", "rollout-0.log"} <= set(logs)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    process = demo(tmp_path, "--quick")
    try:
        run = await_first_step(tmp_path / "runs" / "hurt")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in out
    assert "Traceback" not in out
    assert leftovers(run, timeout_s=DEADLINE_S) == []


def await_first_step(run_dir: Path) -> str:
    """Wait until the job trains and return its run id."""
    reader, history = EventLines(run_dir), []
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        history += reader.new()
        if any(event["kind"] == "step" for event in history):
            return next(str(e["run"]) for e in history if e["kind"] == "job_started")
        time.sleep(0.02)
    raise AssertionError(f"no step within the deadline: {history}")
