"""All ranks leave the loop after the same step, or the job ends and names who did not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import job
from tree import HELPERS

SCRIPT = HELPERS / "leaving_training.py"


def _alone(out: Path, mode: str, *flags: object) -> dict[str, Any]:
    words = [sys.executable, SCRIPT, mode, "--out", out, *flags]
    subprocess.run([str(word) for word in words], check=True, timeout=250)
    found: dict[str, Any] = json.loads((out / "rank-0.json").read_text())
    return found


@pytest.mark.parametrize("mode", ["lead-stop", "all-stop", "all-break"])
def test_all_ranks_leave_after_the_same_step(tmp_path: Path, mode: str) -> None:
    alone = _alone(tmp_path, mode, "--checkpoint", tmp_path / "alone")
    assert alone["completed"] == 6
    root = tmp_path / "root"
    with job(
        tmp_path, mode, "--out", str(tmp_path), "--checkpoint", str(root), script=SCRIPT
    ) as running:
        outcome = running.finish()
    assert outcome.ok, outcome.message
    assert isinstance(outcome.result, dict)
    assert outcome.result["step"] == 6
    for rank in range(2):
        assert json.loads((tmp_path / f"rank-{rank}.json").read_text()) == alone
    assert [path.name[-2:] for path in root.iterdir()] == ["06"]
    again = _alone(tmp_path, "none", "--checkpoint", root)
    assert again == alone, "a stopped run is complete"


def test_a_step_that_is_left_before_its_update_does_not_count(tmp_path: Path) -> None:
    alone = _alone(tmp_path, "all-break-top")
    assert alone["completed"] == 5
    root = tmp_path / "root"
    with job(
        tmp_path, "all-break-top", "--out", str(tmp_path), "--checkpoint", str(root), script=SCRIPT
    ) as running:
        outcome = running.finish()
    assert outcome.ok, outcome.message
    assert json.loads((tmp_path / "rank-1.json").read_text()) == alone
    assert [path.name[-2:] for path in root.iterdir()] == ["05"], "saved as a last step is"
    assert _alone(tmp_path, "all-break-top", "--checkpoint", root) == alone


def test_two_loops_follow_each_other(tmp_path: Path) -> None:
    assert _alone(tmp_path, "two-loops")["completed"] == 13


@pytest.mark.parametrize(
    ("mode", "after"),
    [
        ("lead-break", 6),
        ("lead-break-top", 5),
        ("lead-return", 6),
        ("lead-break-inside", 5),
        ("lead-skip", 0),
    ],
)
def test_a_rank_that_leaves_while_others_go_on_is_named(
    tmp_path: Path, mode: str, after: int
) -> None:
    with job(tmp_path, mode, "--out", str(tmp_path), script=SCRIPT) as running:
        outcome = running.finish()
    assert not outcome.ok
    assert f"rank 0 left the loop after {after} steps" in outcome.message
    assert "rank 1 did not: call run.stop()" in outcome.message
    if after:
        line = outcome.message.partition(f"({SCRIPT.name}:")[2].partition(")")[0]
        left = SCRIPT.read_text().splitlines()[int(line) - 1]
        assert left.strip() in ("break", 'return "early"')


def test_an_error_on_one_rank_is_named(tmp_path: Path) -> None:
    with job(
        tmp_path, "lead-raise", "--out", str(tmp_path), script=SCRIPT, max_attempts=2
    ) as running:
        outcome = running.finish()
    assert not outcome.ok
    assert "ValueError: no such column" in outcome.message
