"""`holdfast doctor` on machines with real faults, before a job and while one runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from jobs import DEADLINE_S, REMEMBERING, job
from tree import ROOT

COMMAND = [sys.executable, "-m", "holdfast.tools.cli", "doctor"]
MOUNTING = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


def doctor(*words: str | Path, shell: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command; ``shell`` is run before it, in a mount namespace of its own."""
    argv = [*COMMAND, *map(str, words)]
    if shell:
        argv = [*MOUNTING, "sh", "-c", f'{shell} && exec "$@"', "sh", *argv]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT, check=False
    )


def finding(done: subprocess.CompletedProcess[str], check: str) -> dict[str, Any]:
    assert done.stdout, done.stderr
    (found,) = [e for e in json.loads(done.stdout)["findings"] if e["check"] == check]
    return dict(found)


@pytest.fixture
def mounts() -> None:
    """Skip where the kernel forbids a mount of one's own."""
    tried = subprocess.run(
        [*MOUNTING, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"no mount namespace: {tried.stderr.decode().strip()}")


@pytest.mark.usefixtures("mounts")
def test_the_shared_memory_of_a_container_is_too_small() -> None:
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    done = doctor("--json", shell=small)
    assert done.returncode == 1
    found = finding(done, "shared memory")
    assert found["verdict"] == "failure"
    assert "64.0 MiB free of 64.0 MiB" in found["found"]
    assert "--shm-size" in found["remedy"]
    planned = doctor("--json", "--state", "4MiB", "--nodes", "3", "--memory", "1MiB", shell=small)
    assert finding(planned, "shared memory")["verdict"] == "ok"
    assert finding(planned, "parity and budget")["verdict"] == "failure"


def test_a_low_limit_of_open_files_is_a_failure() -> None:
    done = doctor("--json", shell="ulimit -n 64")
    assert done.returncode == 1
    found = finding(done, "open files")
    assert (found["verdict"], found["found"]) == ("failure", "64 open files at most")


@pytest.mark.usefixtures("mounts")
def test_a_full_disk_and_a_small_one_are_failures(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    mount = f"mount -t tmpfs -o size=4m tmpfs {place}"
    full = f"{mount} && (cat /dev/zero > {place}/filled 2>&1 || true)"
    found = finding(doctor("--json", "--checkpoint", place, shell=full), "checkpoint disk")
    assert found["verdict"] == "failure"
    assert "No space left on device" in found["found"]
    small = doctor("--json", "--checkpoint", place, "--state", "16MiB", shell=mount)
    assert finding(small, "checkpoint disk")["why"] == "not one has room"
    slow = doctor("--json", "--checkpoint", tmp_path, "--state", "64MiB", "--every", "0.0001")
    assert finding(slow, "checkpoint disk")["verdict"] == "failure"
    assert list(tmp_path.iterdir()) == [place]


def test_keys_that_others_can_read_and_ports_that_are_taken_are_failures(tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    key.touch(mode=0o600)
    key.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = ["--port", str(port), "--reach", f"127.0.0.1:{port}", "--host", "127.0.0.1"]
        done = doctor("--json", "--key-file", key, *words)
    assert done.returncode == 1
    assert finding(done, "key file")["remedy"] == f"chmod o-rwx {key}"
    assert "address already in use" in finding(done, "port")["found"]
    assert finding(done, "reach")["verdict"] == finding(done, "host address")["verdict"] == "ok"
    refused = doctor("--json", "--reach", f"127.0.0.1:{port}", "--host", "192.0.2.1")
    assert "refused" in finding(refused, "reach")["found"]
    assert finding(refused, "host address")["verdict"] == "failure"


def test_a_running_job_is_examined_and_packed_and_an_ended_one_too(tmp_path: Path) -> None:
    run_dir, bundle = tmp_path / "run", tmp_path / "report.tar.gz"
    with job(tmp_path, script=REMEMBERING, nodes=2, per_node=1) as running:
        running.await_event(lambda e: e["kind"] == "step" and e["protected"] >= 3)
        done = doctor(run_dir, "--json")
        packed = doctor(run_dir, "--bundle", bundle)
        pid = running.worker("trainer/0")
    assert finding(done, "nodes")["found"].startswith("2 of 2 answer")
    assert finding(done, "versions")["verdict"] == "ok"
    assert "torch" in finding(done, "versions")["found"]
    assert finding(done, "clocks")["found"].startswith("within 0.")
    assert finding(done, "snapshot memory")["verdict"] == "ok"
    assert finding(done, "run key")["verdict"] == "ok"
    assert packed.returncode == 0, packed.stderr
    assert "run/events-n0.jsonl" in packed.stdout and "not inside: " in packed.stdout
    with tarfile.open(bundle) as archive:
        stacks = archive.extractfile("holdfast-report/stacks.txt")
        statuses = archive.extractfile("holdfast-report/statuses.json")
        assert stacks is not None and statuses is not None
        assert f"trainer/0, process {pid}: ".encode() in stacks.read()
        assert json.loads(statuses.read())["n0"]["status"]["protected"] >= 3
    after = doctor(run_dir, "--json")
    assert "the job is over" in finding(after, "job")["found"]


def test_wrong_calls_are_told() -> None:
    for words, said in (
        (["--bundle", "x.tar.gz"], "--bundle needs RUN_DIR"),
        (["--port", "0"], "is not a port"),
        (["--reach", "9"], "give HOST:PORT"),
    ):
        done = doctor(*words)
        assert done.returncode == 2
        assert said in done.stderr
    assert doctor("no/such/directory").returncode == 1
