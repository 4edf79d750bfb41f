"""A script started by hand has its own sidecar and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.tools.leftovers import leftovers, memory_of, processes_of

DEADLINE_S = 100.0
SCRIPT = """
import sys, time
from holdfast.elastic.channel.base import WorkerPhase
from holdfast.elastic.channel.connecting import connect
from holdfast.elastic.errors import Stopped
from holdfast.elastic.events import UserEvent
from holdfast.elastic.membership.records import JobSpec
from holdfast.ckpt.sidecar.client import SidecarClient

channel = connect()
channel.ready(after=0, spec=JobSpec(), info={"store": "here"})
record = channel.await_generation(after=0)
assert record.number == 1 and record.restore is None and len(record.members) == 1
assert record.members[0].incarnation == channel.incarnation
assert not channel.fenced(1) and channel.role == "trainer"
channel.beat(step=1, phase=WorkerPhase.COMPUTE)
channel.emit(UserEvent(name="hello", fields={"step": 1}))
assert channel.roster().generation == record
assert SidecarClient(channel.sidecar, channel.key).protected_step(generation=1) == -1
try:
    channel.await_generation(after=1)
except Stopped:
    print(channel.run, flush=True)
if "wait" in sys.argv:
    time.sleep(1000)
channel.done()
"""


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    script = directory / "script.py"
    script.write_text(SCRIPT)
    env = {"HOLDFAST_EVENTS": str(directory / "events.jsonl"), "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(
        [sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True, env=env
    )


def test_a_script_works_alone(tmp_path: Path) -> None:
    process = start(tmp_path)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert leftovers(out.strip(), timeout_s=DEADLINE_S) == []
    assert '"kind":"hello"' in (tmp_path / "events.jsonl").read_text()


def test_a_script_whose_sidecar_was_killed_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "wait")
    assert process.stdout is not None
    run = process.stdout.readline().strip()
    (sidecar,) = (pid for pid in processes_of(run) if pid != process.pid)
    os.kill(sidecar, signal.SIGKILL)
    assert memory_of(run), "it stays as long as the script holds it"
    process.send_signal(signal.SIGINT)
    process.wait(timeout=DEADLINE_S)
    assert leftovers(run, timeout_s=DEADLINE_S) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_script_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "wait")
    assert process.stdout is not None
    run = process.stdout.readline().strip()
    assert run.startswith("solo-")
    process.send_signal(number)
    process.wait(timeout=DEADLINE_S)
    assert leftovers(run, timeout_s=DEADLINE_S) == []
