"""``holdfast run`` as a user runs it: exit codes, messages, Ctrl-C, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import pytest
from event_lines import EventLines
from jobs import TOY
from session_imports import IMPORTING_ONCE

from holdfast.elastic.agent.reporting import read_processes
from holdfast.elastic.events import WorkerStarted, of_kind
from holdfast.elastic.events.log import EventReader
from holdfast.elastic.launch.config import LOCAL_TIMING
from holdfast.tools.leftovers import leftovers

DEADLINE_S = 100.0


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Leave no job to the tests that follow where one failed."""
    yield
    while _jobs:
        with _jobs.pop() as job:
            job.kill()


_jobs: list[subprocess.Popen[str]] = []


def holdfast(
    *words: str | Path, stderr: int | IO[str] = subprocess.PIPE, **env: str
) -> subprocess.Popen[str]:
    job = subprocess.Popen(
        [sys.executable, "-m", "holdfast.tools.cli", "run", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=TOY.parents[2],
        env={**os.environ, **env},
    )
    _jobs.append(job)
    return job


def started(run_dir: Path) -> str:
    """Wait until the job trains and return its run id."""
    reader, history = EventLines(run_dir), []
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        history += reader.new()
        if any(event["kind"] == "step" for event in history):
            return next(str(e["run"]) for e in history if e["kind"] == "job_started")
        time.sleep(0.01)
    raise AssertionError(f"the job did not start: {history}")


def toy(directory: Path, *words: str) -> list[str]:
    return [str(TOY), "--progress", str(directory / "progress"), *words]


def test_a_job_tells_its_story_and_exits_0(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    job = holdfast("--nproc", "2", "--run-dir", tmp_path / "run", "--", *toy(tmp_path))
    run = started(tmp_path / "run")
    out, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, err
    assert "holdfast: generation 1: 2 trainers; started" in err
    assert not out
    assert leftovers(run, timeout_s=DEADLINE_S) == []


def test_a_job_whose_story_nobody_can_write_down_goes_on(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        job = holdfast("--run-dir", tmp_path / "run", *toy(tmp_path), stderr=full)
        out, _ = job.communicate(timeout=DEADLINE_S)
    assert (job.returncode, out) == (0, "")


def test_quiet_is_quiet(tmp_path: Path) -> None:
    job = holdfast("--quiet", *toy(tmp_path))
    out, err = job.communicate(timeout=DEADLINE_S)
    assert (job.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_an_interrupt_ends_the_job_in_order(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    job = holdfast("--run-dir", tmp_path / "run", *toy(tmp_path, "--steps", "1000000"))
    (tmp_path / "run").mkdir(exist_ok=True)
    run = started(tmp_path / "run")
    job.send_signal(number)
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == status
    assert f"stopped by {number.name}" in err
    assert "Traceback" not in err
    assert leftovers(run, timeout_s=DEADLINE_S) == []


def test_a_second_interrupt_ends_it_at_once(tmp_path: Path) -> None:
    stubborn = toy(tmp_path, "--steps", "1000000", "--seconds", "1000")
    job = holdfast("--run-dir", tmp_path / "run", *stubborn)
    (tmp_path / "run").mkdir(exist_ok=True)
    deadline_s = time.monotonic() + DEADLINE_S
    reader, history = EventLines(tmp_path / "run"), []
    while not any(event["kind"] == "resumed" for event in history):
        assert time.monotonic() < deadline_s
        history += reader.new()
        time.sleep(0.01)
    began_s = time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM):  # two alike would be one until it is looked at
        job.send_signal(number)
    job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 130
    assert time.monotonic() - began_s < LOCAL_TIMING.stop_timeout_s, "the worker was given no time"
    assert leftovers(str(history[0]["run"]), timeout_s=DEADLINE_S) == []


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    words = ["--nproc", "1", "--nodes", "2", "--role", "rollout=1", "--return-s", "0"]
    job = holdfast(*words, "--run-dir", tmp_path / "run", *toy(tmp_path, "--steps", "1000000"))
    (tmp_path / "run").mkdir(exist_ok=True)
    run = started(tmp_path / "run")
    job.kill()
    job.wait()
    began_s = time.monotonic()
    assert leftovers(run, timeout_s=DEADLINE_S) == []
    print(f"all gone after {time.monotonic() - began_s:.2f} s")


def test_a_stopped_agent_does_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    words = ["--nproc", "1", "--nodes", "2", "--return-s", "0"]
    job = holdfast(*words, "--run-dir", tmp_path / "run", *toy(tmp_path, "--steps", "1000000"))
    (tmp_path / "run").mkdir(exist_ok=True)
    run = started(tmp_path / "run")
    listed = read_processes(tmp_path / "run", "node1")
    assert listed
    job.send_signal(signal.SIGSTOP)  # so that it does not see what becomes of its agent
    os.kill(listed.agent, signal.SIGSTOP)
    job.kill()
    job.wait()
    assert leftovers(run, timeout_s=DEADLINE_S) == []


def test_what_a_killed_machine_left_is_swept_by_the_next_job(tmp_path: Path) -> None:
    stale = Path(f"/dev/shm/holdfast-stale-{os.getpid()}-node0")
    fresh = stale.with_name(f"stale-{os.getpid()}")
    fresh.mkdir(exist_ok=True)
    (fresh / "000001.slot").write_bytes(b"x" * 10_000)
    fresh.rename(stale)  # whole at once: any job that starts now sweeps it
    job = holdfast("--quiet", *toy(tmp_path))
    job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0
    assert not stale.exists()


def test_a_run_directory_nobody_asked_for_is_named_and_never_stays(tmp_path: Path) -> None:
    job = holdfast(*toy(tmp_path, "--steps", "1000000"), TMPDIR=str(tmp_path))
    assert job.stderr is not None
    output = job.stderr.readline()
    named = re.fullmatch(r"holdfast: run directory (\S+), removed at the end .*\n", output)
    assert named is not None, output
    left = Path(named[1])
    assert left.parent == tmp_path
    run = started(left)
    job.kill()
    job.communicate()
    assert leftovers(run, timeout_s=DEADLINE_S) == []
    assert left.exists(), "nobody was there to remove it"
    holdfast("--quiet", *toy(tmp_path), TMPDIR=str(tmp_path)).communicate(timeout=DEADLINE_S)
    assert list(tmp_path.glob("holdfast-*")) == []


def test_a_module_runs_as_python_would_run_it(tmp_path: Path) -> None:
    _, *words = toy(tmp_path)
    job = holdfast("-m", TOY.stem, *words, PYTHONPATH=str(TOY.parent))
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, err
    assert (tmp_path / "progress").read_text()


def test_a_missing_script_is_one_paragraph(tmp_path: Path) -> None:
    job = holdfast("--nproc", "2", tmp_path / "nowhere.py")
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 2
    assert re.fullmatch(r"holdfast: \S+/nowhere\.py: no such script .*\n", err)


FAULTY = """
import holdfast

@holdfast.resilient(batch=holdfast.Batch(microbatches=2))
def train(run):
    {within}

{above}
train()
"""


@pytest.mark.parametrize(
    ("place", "line"), [("within", 6), pytest.param("above", 8, marks=pytest.mark.exhaustive)]
)
def test_a_fault_of_all_ranks_is_told_once_and_ends_the_job(
    place: str, line: int, tmp_path: Path
) -> None:
    script = tmp_path / "faulty.py"
    lines = {"within": "pass", "above": "", place: "raise KeyError('vocab')"}
    script.write_text(FAULTY.format(**lines))
    job = holdfast("--nodes", "2", "--run-dir", tmp_path / "run", script, **IMPORTING_ONCE)
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 1
    assert err.count("Traceback") == 1
    assert f"KeyError at faulty.py:{line}" in err.splitlines()[-1]
    events = EventReader(tmp_path / "run").new()
    starts = len(of_kind(events, WorkerStarted))
    assert starts <= 3, "one may start again before the other has ended"


def test_a_crashing_script_is_one_paragraph(tmp_path: Path) -> None:
    job = holdfast("--max-attempts", "2", "--quiet", *toy(tmp_path, "--crash"))
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 1
    assert err.count("\n") == 1
    assert "ValueError: this script always crashes" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc", "0", "x.py"],
        ["--role", "trainer=2", "x.py"],
        ["--role", "rollout", "x.py"],
        ["--min-hang-s", "-1", "x.py"],
        ["--world", "9", "--nproc", "2", str(TOY)],
        ["--capture-output", str(TOY)],
        ["--run-dir", "/proc/nowhere", str(TOY)],
        [],
    ],
)
def test_a_wrong_call_is_refused(words: list[str]) -> None:
    job = holdfast(*words)
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 2
    assert "Traceback" not in err


def test_output_is_captured_per_seat(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text(
        "import os, json\n"
        "from holdfast.elastic.channel.connecting import connect\n"
        "channel = connect()\n"
        "print('hello from', channel.seat, os.environ['OMP_NUM_THREADS'])\n"
        "channel.ready(after=0, spec=None, info={})\n"
        "channel.await_generation(after=0)\n"
        "channel.done()\n"
    )
    run_dir = tmp_path / "run"
    job = holdfast("--nproc", "2", "--run-dir", run_dir, "--capture-output", script)
    out, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, err
    assert not out
    stamp, _, text = (run_dir / "logs" / "trainer-1.log").read_text().partition(" ")
    assert datetime.fromisoformat(stamp).tzinfo is UTC
    assert text == "hello from trainer/1 1\n"


def test_the_planner_hears_of_the_nodes_domains(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--domain", "rack-7", "--run-dir", tmp_path / "run")
    job = holdfast(*words, "--", *toy(tmp_path))
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, err
    proposed = [
        event for event in EventLines(tmp_path / "run").new() if event["kind"] == "proposed"
    ]
    assert "domain rack-7 holds" in str(proposed[-1]["reason"])
