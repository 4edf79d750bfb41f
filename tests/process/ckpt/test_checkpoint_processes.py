"""Checkpoints of real sidecars that are really killed, and of real jobs with failing stores."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doubles.blocks import write_block
from event_lines import EventLines
from forked_scripts import ran
from session_imports import IMPORTING_ONCE
from sidecar_group import (
    DEADLINE_S,
    SidecarGroup,
    inventories,
    sidecar_group,
    wait_until,
)
from tree import HELPERS

from holdfast.ckpt.checkpoints.assemble import Assembler
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.memory.target import CheckpointTarget, DiskTarget
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.disk.directory import SpillDirectory

NBYTES = 300_000


@pytest.mark.parametrize("wipe", [False, True])
def test_a_sidecar_killed_in_the_middle_of_a_pack(tmp_path: Path, wipe: bool) -> None:
    root = tmp_path / "root"
    target = CheckpointTarget(root=str(root), bytes_per_s=200_000)
    with sidecar_group(tmp_path, "a", "b", "c") as group:
        world = group.adopt()
        payloads = {
            rank: write_block(
                group.clients[node], world, step=7, rank=rank, nbytes=NBYTES, persist=target
            )
            for rank, node in enumerate(world.rank_nodes)
        }
        group.await_protected(world, 7)
        wait_until(lambda: 0 < _written(group) < NBYTES, "node b has written a part")
        group.kill("b", wipe=wipe)
        if not wipe:
            group.start("b")
        point = restore_points(inventories(group))[0][0]
        assert point.sources[1].rebuilt == wipe
        group.adopt(generation=2, rank_nodes=tuple(sorted(group.clients)), restore=point)
        for client in group.clients.values():
            assert client.durable_step(at_least=7, timeout_s=DEADLINE_S) == 7
        assert group.clients["a"].status()["persist_priority"].startswith("nice 19")
    with StoreSource(root, 7) as source:
        read = Assembler(source)
        for rank, payload in payloads.items():
            assert read.bytes(f"w{rank}") == payload


def _written(group: SidecarGroup) -> int:
    pending = group.clients["b"].status()["persist_pending"]
    return sum(each["written_bytes"] for each in pending)


def _train(result: Path, root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Train five steps with checkpoints of steps 3 and 5; with ``options``, by ``holdfast run``."""
    launch = ["-m", "holdfast.tools.cli", "run", *options] if options else []
    script = HELPERS / "tiny_training.py"
    flags = ["--steps", "5", "--result", result, "--checkpoint", root, "--checkpoint-every", "3"]
    words = [sys.executable, *launch, script, *flags]
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=250, check=False
    )


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A place for checkpoints that takes step 3 and refuses step 5."""
    (tmp_path / "root" / "step-000000000005").mkdir(parents=True)
    (tmp_path / "root" / "step-000000000005" / "data").write_text("in the way")
    return tmp_path / "root"


def test_a_job_whose_last_step_cannot_be_saved_says_what_is(tmp_path: Path, blocked: Path) -> None:
    done = _train(tmp_path / "result.json", blocked)
    assert done.returncode == 1
    assert "step 5 was not saved: checkpoint of step 5 to" in done.stderr
    assert "the newest checkpoint is step 3" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_that_skips_failing_checkpoints_ends_well(tmp_path: Path, blocked: Path) -> None:
    done = _train(tmp_path / "result.json", blocked, "--on-checkpoint-error", "skip")
    assert done.returncode == 0, done.stderr
    assert "holdfast: step 5 was not saved: checkpoint of step 5 to" in done.stderr
    assert (tmp_path / "result.json").exists()


def test_a_job_that_stops_at_the_first_failure(tmp_path: Path, blocked: Path) -> None:
    done = _train(tmp_path / "result.json", blocked, "--on-checkpoint-error", "stop")
    assert done.returncode == 1
    assert "step 5 was not saved" in done.stderr


def _run(
    result: Path, steps: int, *options: str | Path, flags: tuple[str | Path, ...] = ()
) -> dict[str, Any]:
    """Train by ``holdfast run``; return the result."""
    script = HELPERS / "tiny_training.py"
    launch = ["-m", "holdfast.tools.cli", "run", *options]
    words = [sys.executable, *launch, script, "--steps", steps, "--result", result, *flags]
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, **IMPORTING_ONCE},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return found


class Stopped(NamedTuple):
    """The state after a job of three nodes that ended at step 25: disks, checkpoints, its flags.

    ``unbroken`` is the result of 26 steps without interruption.
    """

    folder: Path
    unbroken: dict[str, Any]

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def flags(self) -> tuple[str | Path, ...]:
        return ("--checkpoint", self.root, "--checkpoint-every", "15")

    def go_on(self, *, flags: tuple[str | Path, ...] = ()) -> dict[str, list[dict[str, Any]]]:
        """Start it again for one more step; return its reports by kind."""
        run_dir = self.folder / "run"
        run_dir.mkdir()
        options = (*_guarded(self.disk), "--run-dir", run_dir)
        assert _run(self.folder / "again.json", 26, *options, flags=flags) == self.unbroken
        return _by_kind(run_dir)


def _guarded(disk: Path) -> tuple[str | Path, ...]:
    return ("--nodes", "3", "--disk", disk, "--parity", "1")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """The job that the tests below go on from, each with a copy of its own."""
    folder = tmp_path_factory.mktemp("ended")
    alone = [sys.executable, HELPERS / "tiny_training.py", "--steps", "26"]
    ran([*alone, "--result", folder / "alone.json"], check=True)
    found = Stopped(folder, json.loads((folder / "alone.json").read_text()))
    slowly = ("--pace", "0.2")  # a snapshot is on the disks before the one after next is due
    _run(folder / "result.json", 25, *_guarded(found.disk), flags=(*found.flags, *slowly))
    return found


@pytest.fixture
def stopped(tmp_path: Path, ended: Stopped) -> Stopped:
    return Stopped(shutil.copytree(ended.folder, tmp_path / "job"), ended.unbroken)


def test_a_job_started_again_goes_on_from_the_nodes_disks(stopped: Stopped) -> None:
    events = stopped.go_on()
    assert {(each["tier"], each["step"]) for each in events["restored"]} == {("disk", 20)}
    assert len(events["restored"]) == 3


@pytest.mark.exhaustive
def test_a_job_goes_on_from_the_disks_that_are_left(stopped: Stopped) -> None:
    shutil.rmtree(stopped.disk / "node1")
    events = stopped.go_on()
    assert {(each["tier"], each["step"]) for each in events["restored"]} == {("disk", 20)}
    assert any("rebuilt from parity" in each["how"] for each in events["restored"])
    assert "disk_refused" not in events


def test_what_is_on_too_few_disks_is_refused_by_name_and_the_checkpoint_taken(
    stopped: Stopped,
) -> None:
    for step in set(committed_steps(stopped.root)) - {15}:
        shutil.rmtree(stopped.root / f"step-{step:012d}")
    for node in ("node0", "node1"):
        shutil.rmtree(stopped.disk / node)
    events = stopped.go_on(flags=stopped.flags)
    (refused,) = events["disk_refused"]
    assert refused["step"] == 20
    assert refused["newest_checkpoint"] == 15
    assert "those of nodes node0, node1 are missing" in refused["reason"]
    assert {(each["tier"], each["step"]) for each in events["restored"]} == {("checkpoint", 15)}


@pytest.mark.exhaustive
def test_a_snapshot_on_the_disks_comes_before_a_checkpoint_older_than_it(stopped: Stopped) -> None:
    newest = max(committed_steps(stopped.root))
    assert newest > 20 and 15 in committed_steps(stopped.root)
    for pack in (stopped.root / f"step-{newest:012d}").rglob("*"):
        if pack.is_file() and pack.suffix != ".json":
            content = bytearray(pack.read_bytes())
            content[:] = bytes(byte ^ 1 for byte in content)
            pack.write_bytes(content)
    events = stopped.go_on(flags=stopped.flags)
    assert {(each["tier"], each["step"]) for each in events["restored"]} == {("disk", 20)}


def _by_kind(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for event in EventLines(run_dir).new():
        found.setdefault(event["kind"], []).append(event)
    return found


@pytest.mark.parametrize("where", ["checkpoint", "disk"])
def test_stopped_sidecars_save_the_newest_protected_step(tmp_path: Path, where: str) -> None:
    root = tmp_path / "root"
    with sidecar_group(tmp_path, "a", "b") as group:
        world = group.adopt()
        for client in group.clients.values():
            if where == "checkpoint":
                client.persist_to(CheckpointTarget(root=str(root), grace_s=60.0))
            else:
                client.spill(DiskTarget(directory=str(root), every=100, grace_s=60.0))
        for step in (1, 2, 3):
            payloads = {
                rank: write_block(group.clients[node], world, step=step, rank=rank, nbytes=NBYTES)
                for rank, node in enumerate(world.rank_nodes)
            }
            group.await_protected(world, step)
        for process in group.processes.values():
            os.kill(process.pid, signal.SIGTERM)
        for process in group.processes.values():
            assert process.process.wait(DEADLINE_S) == 0
    if where == "disk":
        for node in ("a", "b"):
            assert [each.step for each in SpillDirectory(root / node).snapshots()] == [3]
        return
    with StoreSource(root, 3) as source:
        read = Assembler(source)
        for rank, payload in payloads.items():
            assert read.bytes(f"w{rank}") == payload


def test_a_job_stopped_by_sigterm_saves_within_its_grace(tmp_path: Path) -> None:
    root, run_dir = tmp_path / "root", tmp_path / "run"
    run_dir.mkdir()
    launch = [
        "-m",
        "holdfast.tools.cli",
        "run",
        "--nodes",
        "2",
        "--stop-grace-s",
        "4",
        "--run-dir",
        run_dir,
    ]
    flags = ["--steps", "100000", "--result", tmp_path / "result", "--checkpoint", root]
    script = HELPERS / "tiny_training.py"
    words = [sys.executable, *launch, script, *flags, "--checkpoint-every", "100000"]
    with (
        subprocess.Popen(
            [str(word) for word in words],
            stderr=subprocess.PIPE,
            env={**os.environ, **IMPORTING_ONCE},
        ) as job,
        contextlib.ExitStack() as ended,
    ):
        ended.callback(job.kill)
        reader, events = EventLines(run_dir), []

        def trained() -> bool:
            events.extend(event for event in reader.new() if event["kind"] == "step")
            return any(event["step"] >= 5 for event in events)

        deadline_s = time.monotonic() + DEADLINE_S
        while not trained():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=250)
    (step,) = committed_steps(root)
    assert step >= 3
