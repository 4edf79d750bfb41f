"""The training example of the docs: alone, and elastic under kill -9 and kill -STOP."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from event_lines import EventLines
from forked_scripts import ran
from session_imports import IMPORTING_ONCE
from tree import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "train_gpt.py"
STEPS = 9


def _alone(result: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLE, "--result", result, *flags]
    return ran(command)


def _result(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a run that nothing happened to."""
    path = tmp_path_factory.mktemp("alone") / "result.json"
    done = _alone(path, "--steps", STEPS)
    assert done.returncode == 0, done.stderr
    result = _result(path)
    assert result["steps"] == STEPS
    if importlib.util.find_spec("tqdm"):
        assert f"{STEPS}/{STEPS}" in done.stderr, "the bar comes to its end"
    return result


def test_the_example_needs_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    names = runpy.run_path(str(EXAMPLE))
    assert list(names["tqdm"](iter(range(3)), initial=1, total=3)) == [0, 1, 2]


class Job:
    """A job under ``holdfast run`` whose events the test follows."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path) -> None:
        self.process = process
        self._reader = EventLines(run_dir)
        self.events: list[dict[str, Any]] = []

    def await_event(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first event that is ``wanted``, waiting for it."""
        deadline, seen = time.monotonic() + 240, 0
        while time.monotonic() < deadline:
            self.events += self._reader.new()
            for event in self.events[seen:]:
                if wanted(event):
                    return event
            seen = len(self.events)
            assert self.process.poll() is None, f"the job ended early: {self.events[-5:]}"
            time.sleep(0.01)
        raise AssertionError(f"the event did not come; last were {self.events[-5:]}")

    def pid(self, seat: str) -> int:
        """Return the process that plays ``seat`` now."""
        started = [e for e in self.events if e["kind"] == "worker_started" and e["seat"] == seat]
        return int(started[-1]["pid"])


@contextmanager
def _job(run_dir: Path, *flags: object) -> Iterator[Job]:
    command = [
        sys.executable,
        "-m",
        "holdfast.tools.cli",
        "run",
        "--nproc",
        3,
        "--run-dir",
        run_dir,
    ]
    words = [str(word) for word in (*command, EXAMPLE, *flags)]
    env = {**os.environ, **IMPORTING_ONCE}
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=env)
    try:
        yield Job(process, run_dir)
        assert process.wait(timeout=250) == 0
    finally:
        process.kill()
        process.wait()


def _hurt(job: Job, seat: str, how: signal.Signals, *, after_step: int) -> float:
    """Hurt a rank once ``after_step`` is done; return the seconds until a step is done again."""
    job.await_event(lambda e: e["kind"] == "step" and e["step"] >= after_step)
    before = max(e["generation"] for e in job.events if e["kind"] == "step")
    hurt_at = time.time()
    os.kill(job.pid(seat), how)
    resumed = job.await_event(lambda e: e["kind"] == "resumed" and e["generation"] > before)
    return float(resumed["time_s"]) - hurt_at


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_and_stopped_ranks_leave_no_trace_in_the_weights(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    result = tmp_path / "result.json"
    with _job(tmp_path / "run", "--steps", STEPS, "--result", result) as job:
        killed_s = _hurt(job, "trainer/0", signal.SIGKILL, after_step=2)
        stopped_s = _hurt(job, "trainer/1", signal.SIGSTOP, after_step=5)
    assert _result(result) == undisturbed
    survivor = [e for e in job.events if e["kind"] == "worker_started" and e["seat"] == "trainer/2"]
    assert len(survivor) == 1, "a survivor was restarted"
    assert killed_s < 60, "back within a second on an idle machine; this bound is for a busy one"
    assert stopped_s < 60
