"""A logger gets the metrics of every step once and in order, whoever is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from jobs import DEADLINE_S, Job, hurt, job
from tree import HELPERS

SCRIPT = HELPERS / "logging_training.py"


def _log(out: Path) -> list[tuple[int, str]]:
    path = out / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def _leader_at(out: Path, step: int) -> int:
    """Wait until the leader is at a gate; return its process."""
    file, until_s = out / f"at-{step}", time.monotonic() + DEADLINE_S
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until_s, _log(out)
        time.sleep(0.02)
    return int(file.read_text())


def _seat_of(running: Job, pid: int) -> tuple[str, str]:
    """Return the node and the seat of a worker."""
    for name, node in running.launcher.processes().items():
        for seat, found in node.workers.items():
            if found == pid:
                return name, seat
    raise AssertionError(f"no worker {pid} in {running.launcher.processes()}")


def test_every_step_comes_once_though_workers_leaders_and_a_node_are_lost(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    subprocess.run([sys.executable, str(SCRIPT), "--out", str(alone)], check=True, timeout=250)
    steps = [step for step, _ in _log(alone)]
    assert steps == list(range(12))
    flags = ["--out", str(tmp_path), "--gates", "3", "5", "7", "--dies", "9"]
    with job(tmp_path, *flags, nodes=3, per_node=1, script=SCRIPT) as running:
        for step in (3, 5, 7):
            leader = _leader_at(tmp_path, step)
            assert [row[0] for row in _log(tmp_path)] == list(range(step - 1))
            node, seat = _seat_of(running, leader)
            if step == 3:
                other = next(s for s in ("trainer/1", "trainer/2") if s != seat)
                hurt(running.worker(other))
            elif step == 5:
                hurt(leader)
            else:
                assert running.launcher.lose_machine(node)
            (tmp_path / f"go-{step}").touch()
        outcome = running.finish()
    assert outcome.ok, outcome.message
    assert (tmp_path / "died").exists(), "a leader died between a call and the end of its step"
    assert _log(tmp_path) == _log(alone)
