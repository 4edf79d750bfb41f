"""All ranks leave the loop after the same step, or the job ends and names who did not."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked_scripts import ran
from jobs import DEADLINE_S, hurt, job
from leaving_bodies import leave_at_once_and_late
from ranks import ranks
from tree import HELPERS

SCRIPT = HELPERS / "leaving_training.py"


def _await(file: Path) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not file.exists():
        assert time.monotonic() < until_s, file
        time.sleep(0.02)


def _alone(out: Path, mode: str, *flags: object) -> dict[str, Any]:
    words = [sys.executable, SCRIPT, mode, "--out", out, *flags]
    ran(words, check=True)
    found: dict[str, Any] = json.loads((out / "rank-0.json").read_text())
    return found


@pytest.mark.parametrize(
    "mode",
    [
        "lead-stop",
        pytest.param("all-stop", marks=pytest.mark.exhaustive),
        pytest.param("all-break", marks=pytest.mark.exhaustive),
    ],
)
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
    assert [path.name[-2:] for path in root.glob("step-*")] == ["06"]
    again = _alone(tmp_path, "none", "--checkpoint", root)
    assert again == alone, "a stopped run is complete"


def test_a_step_that_is_left_before_its_update_does_not_count(tmp_path: Path) -> None:
    alone = _alone(tmp_path, "all-break-top")
    assert alone["completed"] == 5
    logged = (tmp_path / "logged.jsonl").read_text()
    assert [json.loads(line)[0] for line in logged.splitlines()] == [0, 1, 2, 3, 4]
    root = tmp_path / "root"
    with job(
        tmp_path, "all-break-top", "--out", str(tmp_path), "--checkpoint", str(root), script=SCRIPT
    ) as running:
        outcome = running.finish()
    assert outcome.ok, outcome.message
    assert json.loads((tmp_path / "rank-1.json").read_text()) == alone
    assert (tmp_path / "logged.jsonl").read_text() == 2 * logged
    assert [path.name[-2:] for path in root.glob("step-*")] == ["05"], "saved as a last step is"
    assert _alone(tmp_path, "all-break-top", "--checkpoint", root) == alone


def test_two_loops_follow_each_other(tmp_path: Path) -> None:
    assert _alone(tmp_path, "two-loops")["completed"] == 13


@pytest.mark.parametrize(
    ("mode", "after"),
    [
        ("lead-break", 6),
        pytest.param("lead-break-top", 5, marks=pytest.mark.exhaustive),
        pytest.param("lead-return", 6, marks=pytest.mark.exhaustive),
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


@pytest.mark.exhaustive
def test_a_rank_that_catches_an_error_of_its_own_and_goes_on_is_named(tmp_path: Path) -> None:
    with job(tmp_path, "lead-catch", "--out", str(tmp_path), script=SCRIPT) as running:
        outcome = running.finish()
    assert not outcome.ok
    assert f"the pass over run.microbatches begun at {SCRIPT.name}:" in outcome.message
    assert "If an exception in the pass was caught, let it end the function" in outcome.message
    assert not any("SIGABRT" in each["status"] for each in running.events("worker_exited"))


def test_a_rank_whose_function_is_over_is_missed_only_in_collectives_that_it_did_not_join(
    tmp_path: Path,
) -> None:
    """In the first world one comes late, in the second one does not come."""
    with ranks(3, leave_at_once_and_late, tmp_path, with_world=False) as going:
        found = going.results()
    waits = "the function is over on rank 0, and rank"
    (said,) = {
        each["second"].partition(" waits for it in a collective at ")[0][:-2] for each in found
    }
    assert said == waits
    assert all("call it on all ranks alike, or on none" in each["second"] for each in found)


@pytest.mark.exhaustive
def test_a_rank_that_waits_for_one_whose_function_is_over_is_named_with_its_line(
    tmp_path: Path,
) -> None:
    with job(
        tmp_path,
        "lead-recv",
        "--out",
        str(tmp_path),
        script=SCRIPT,
        timing={"min_hang_s": 1.0},
        max_attempts=2,
    ) as running:
        outcome = running.finish()
    assert not outcome.ok
    assert "trainer/0 in the end of the function" in outcome.message
    assert f"trainer/1 in dist.recv at {SCRIPT.name}:" in outcome.message


def test_a_replacement_that_came_too_late_is_no_failure_of_the_job(tmp_path: Path) -> None:
    with job(
        tmp_path, "late", "--out", str(tmp_path), script=SCRIPT, timing={"stop_timeout_s": 60.0}
    ) as running:
        for rank in range(2):
            _await(tmp_path / f"at-{rank}")
        hurt(running.worker("trainer/1"))
        _await(tmp_path / "started")
        (tmp_path / "go").touch()
        running.await_event(lambda e: e["kind"] == "worker_exited" and e["seat"] == "trainer/0")
        (tmp_path / "over").touch()
        outcome = running.finish()
    assert outcome.ok, outcome.message
    ends = {event["seat"]: event["status"] for event in running.events("worker_exited")}
    assert ends == {"trainer/0": "exit status 0", "trainer/1": "it ended with the job"}
    assert len([e for e in running.events("detected") if e["what"] == "exit"]) == 1, "the kill"
