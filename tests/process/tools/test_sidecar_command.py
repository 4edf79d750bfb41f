"""A separate sidecar beside torchrun: restarted processes resume from its memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torchruns import DEADLINE_S, torchruns
from undisturbed import WAITING, alone, weights

from holdfast.ckpt.memory.arena import arena_path
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.elastic.channel.shared_key import shared_key
from holdfast.elastic.channel.sidecar_file import SidecarFile

Start = Callable[[str], Path]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.tools.cli", "sidecar", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the sidecar of a node of this test's run, and return its file; all end with it."""
    run, files = f"test-{os.getpid()}-{tmp_path.name[-20:]}", []

    def begin(node: str) -> Path:
        file = tmp_path / f"sidecar-{node}.json"
        files.append(file)
        words = ("--run", run, "--node", node, "--file", str(file))
        done = command("start", *words, "--key-file", str(tmp_path / "key.json"))
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"export HOLDFAST_SIDECAR={file}\n"
        return file

    yield begin
    for file in files:
        if file.exists():
            assert command("stop", "--file", str(file)).returncode == 0
    assert not list(Path("/dev/shm").glob(f"holdfast-{run}-*"))


def wait_until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.02)


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_that_torchrun_restarts_go_on_from_the_sidecars_memory(
    tmp_path: Path, start: Start
) -> None:
    with torchruns(tmp_path, WAITING) as job:
        options = ("--nnodes=2", "--max-restarts=2")
        agents = [job.start(*options, sidecar=start(node)) for node in ("a", "b")]
        waiting = job.await_lines(lambda line: "waits" in line, count=2)
        os.kill(waiting[0]["pid"], signal.SIGKILL)
        job.end.touch()
        again = job.await_lines(lambda line: line.get("begins", 0) > 0, count=2)
        assert {line["begins"] for line in again} <= {5, 6}
        done = job.await_lines(lambda line: "done" in line, count=2)
        job.finish(*agents)
    expected = alone()
    assert [weights(line) for line in done] == [expected, expected]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_lost_with_its_memory_is_rebuilt_from_parity(tmp_path: Path, start: Start) -> None:
    with torchruns(tmp_path, WAITING) as job:
        files = [start("a"), start("b")]
        agents = [
            job.start("--nnodes=1:2", conf="last_call_timeout=90", sidecar=file) for file in files
        ]
        job.await_lines(lambda line: "waits" in line, count=2)
        lost = SidecarFile.read(files[0])
        for pid in (agents[0].pid, lost.pid):
            os.kill(pid, signal.SIGKILL)  # the sidecar and the worker end with who kept them
        shutil.rmtree(arena_path(lost.run, lost.node), ignore_errors=True)  # or swept by others
        files[0].unlink()
        job.end.touch()
        (line,) = job.await_lines(lambda line: line.get("world") == 1 and "begins" in line, count=1)
        assert 3 <= line["begins"] <= 6, "parity may have been as far behind as there are slots"
        (done,) = job.await_lines(lambda line: "done" in line, count=1)
        job.finish(agents[1])
    assert weights(done) == alone()


@pytest.mark.timeout(200)
def test_a_killed_sidecar_is_started_again_over_the_same_memory(
    tmp_path: Path, start: Start
) -> None:
    file = start("a")
    found = SidecarFile.read(file)
    key = shared_key(tmp_path / "key.json")
    written = file.stat().st_ino
    os.kill(child_of(found.pid), signal.SIGKILL)
    wait_until(lambda: file.stat().st_ino != written)
    assert SidecarFile.read(file).address == found.address, "peers find it where it was"
    again = SidecarClient(found.address, key)
    assert again.status()["generation"] == 0
    again.close()
    assert SidecarFile.read(file).pid == found.pid
    second = command("serve", "--run", found.run, "--node", "a", "--file", str(file))
    assert second.returncode == 2
    assert "already runs this sidecar" in second.stderr
    assert command("stop", "--file", str(file)).returncode == 0
    assert not file.exists()
    gone = command("stop", "--file", str(file))
    assert gone.returncode == 2
    assert "no sidecar has written this file" in gone.stderr


def test_a_sidecar_is_labelled_with_what_its_node_fails_together_with(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_DOMAIN", "rack-7")
    assert SidecarFile.read(start("a")).domain == "rack-7"
    wrong = command("serve", "--domain", "rack 7", "--run", "r", "--node", "n")
    assert (wrong.returncode, "--domain 'rack 7': give a name" in wrong.stderr) == (2, True)


def test_a_key_is_made_and_help_says_how_to_use_it(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    made = command("key", "--key-file", str(path))
    assert (made.returncode, made.stdout) == (0, f"{path}\n")
    key = shared_key(path)
    assert command("key", "--key-file", str(path)).returncode == 0
    assert shared_key(path) == key
    output = command("--help").stdout
    assert "holdfast sidecar start --run" in output
    assert command("serve", "--run", "a/b").returncode == 2
