"""`holdfast logs` of a running job, of one that is over, and without any."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import DEADLINE_S, REMEMBERING, hurt, job
from tree import ROOT

from holdfast.elastic.events import UserEvent
from holdfast.elastic.events.log import EventWriter, events_file

COMMAND = [sys.executable, "-m", "holdfast.tools.cli", "logs"]


def logs(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        check=False,
    )


def test_a_follower_sees_a_loss_in_time_order_and_ends_with_the_job(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = {"capture_output": True, "stamp_output": True}
    with job(tmp_path, script=REMEMBERING, nodes=2, per_node=1, **options) as running:
        running.await_event(lambda each: each["kind"] == "step" and each["node"] == "n1")
        with subprocess.Popen(
            [*COMMAND, str(run_dir), "--follow", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as following:
            hurt(running.worker("trainer/1"))
            running.generation(2)
            running.launcher.stop("seen enough")
            out, error = following.communicate(timeout=DEADLINE_S)
            assert following.returncode == 0, error
    told = [json.loads(line) for line in out.splitlines()]
    kinds = [each["kind"] for each in told]
    assert kinds[0] == "job_started"
    assert {"worker_exited", "proposed", "resumed", "job_ended"} <= set(kinds)
    assert "step" not in kinds
    lost = next(each for each in told if each["kind"] == "detected")
    assert (lost["level"], lost["message"]) == ("warning", "trainer/1 was killed by SIGKILL")

    after = logs(run_dir, "--json")
    times = [json.loads(line)["time_s"] for line in after.stdout.splitlines()]
    assert times == sorted(times)
    assert sorted(after.stdout.splitlines()) == sorted(out.splitlines())

    steps = logs(run_dir, "--kind", "step", "--node", "n1")
    assert steps.stdout and all(" n1" in line for line in steps.stdout.splitlines())
    warnings = logs(run_dir, "--level", "warning").stdout
    assert "WARNING trainer/1 was killed by SIGKILL" in warnings
    assert " starts, process " not in warnings
    odd = logs(run_dir, "--node", "n7")
    assert odd.returncode == 0
    assert "no node n7 is in it; there are launcher, n0, n1" in odd.stderr


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "key.json").touch()
    writer = EventWriter(events_file(tmp_path, "n0"), node="n0")
    writer.write(UserEvent(name="first", time_s=1000.0), source="worker")
    command = [*COMMAND, str(tmp_path), "--follow", "--node", "n0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as following:
        assert following.stdout is not None
        assert "first" in following.stdout.readline()
        following.send_signal(signal.SIGINT)
        _, error = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 130
    line = error.splitlines()[0]
    assert line.endswith(f"logs {tmp_path} --follow --node n0 --since 1970-01-01T00:16:40.000Z")
    writer.write(UserEvent(name="second", time_s=time.time()), source="worker")
    writer.close()
    rest = logs(tmp_path, "--since", "1970-01-01T00:16:40.000Z")
    assert [line.rpartition(": ")[2] for line in rest.stdout.splitlines()] == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "said"), [("none", "no such directory"), (".", "no job was started here")]
)
def test_no_run_is_an_error_at_once(tmp_path: Path, name: str, said: str) -> None:
    done = logs(tmp_path / name, "--follow")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and said in done.stderr
