"""A logger gets the metrics of every step, and of an evaluation after it, once and in order."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from forked_scripts import ran
from jobs import DEADLINE_S, Job, hurt, job
from tree import HELPERS

SCRIPT = HELPERS / "logging_training.py"


def _log(out: Path) -> list[tuple[int, str, str]]:
    path = out / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def _check_marks(out: Path) -> None:
    """Check that the code between steps is marked on all ranks wherever it runs again."""
    marks: dict[tuple[int, int], set[bool]] = {}
    for line in (out / "bodies.jsonl").read_text().splitlines():
        step, _, generation, repeats = json.loads(line)
        marks.setdefault((generation, step), set()).add(repeats)
    assert all(len(said) == 1 for said in marks.values()), marks
    before, repeated = -1, 0
    for generation in sorted({each for each, _ in marks}):
        mine = {step: said == {True} for (at, step), said in marks.items() if at == generation}
        assert all(marked for step, marked in mine.items() if step <= before), (before, mine)
        assert not any(marked for step, marked in mine.items() if step > before + 1), mine
        repeated += sum(step <= before for step in mine)
        before = max(before, *mine)
    assert repeated


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
    ran([sys.executable, SCRIPT, "--out", alone], check=True)
    steps = [row[0] for row in _log(alone)]
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
    _check_marks(tmp_path)
