"""A loss that goes wrong: all ranks roll back, skip the step, or stop, and all do the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked_scripts import ran
from jobs import Job, launched, trainers
from tree import HELPERS

from holdfast.elastic.launch.config import python_command

SCRIPT = HELPERS / "guarded_training.py"


def guarded(directory: Path, name: str, *args: str) -> tuple[Any, Job, str]:
    """Run the script to its end; return the outcome, the job, and the hash of the weights."""
    result = directory / f"{name}.json"
    config = trainers(
        SCRIPT,
        ["--result", str(result), "--count", str(directory / f"{name}.count"), *args],
        nodes=2,
        run_dir=directory / name,
    )
    with launched(config) as running:
        outcome = running.finish()
    return outcome, running, json.loads(result.read_text())["hash"] if result.exists() else ""


def by_hand(directory: Path, *args: str) -> str:
    """Run the script, exactly, without a launcher; return the hash of the weights."""
    result, count = directory / "result.json", directory / "count"
    flags = ["--exact", "--result", str(result), "--count", str(count), *args]
    ran(python_command(SCRIPT, flags), check=True)
    found: str = json.loads(result.read_text())["hash"]
    return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of an exact run in which nothing goes wrong, on however many ranks."""
    return by_hand(tmp_path_factory.mktemp("calm"))


def went_back(directory: Path, *flags: str) -> str:
    """Have two ranks meet a fault that passes; return the hash of the weights."""
    flags = ("--bad", "5:1", "--pace", "0.05", *flags)
    outcome, running, found = guarded(directory, "bad", *flags)
    assert outcome.ok, outcome.message
    said = running.events("loss")
    assert [(e["step"], e["action"]) for e in said] == [(5, "rollback")]
    assert running.events("proposed")[-1]["restore_step"] == 3, "two steps before it went wrong"
    started = running.events("worker_started")
    assert len(started) == 2, "nobody was started again"
    return found


@pytest.mark.exhaustive
def test_a_fault_that_passes_in_a_gradient_is_undone_bit_for_bit(tmp_path: Path, calm: str) -> None:
    """Even if the script catches the error by which a rank goes back."""
    assert went_back(tmp_path, "--exact", "--catch") == calm


def test_a_fault_that_passes_in_the_loss_is_undone_bit_for_bit(tmp_path: Path) -> None:
    *_, undisturbed = guarded(tmp_path, "calm")
    assert went_back(tmp_path) == undisturbed


@pytest.mark.exhaustive
def test_it_is_told_though_the_rank_that_tells_is_the_last_to_see_it(tmp_path: Path) -> None:
    outcome, running, _ = guarded(tmp_path, "bad", "--bad", "5:1", "--late", "0.3")
    assert outcome.ok, outcome.message
    assert [(e["step"], e["action"]) for e in running.events("loss")] == [(5, "rollback")]


def test_what_goes_wrong_again_ends_the_job_after_so_many_tries(tmp_path: Path) -> None:
    outcome, running, _ = guarded(tmp_path, "bad", "--bad", "5", "--pace", "0.02")
    assert not outcome.ok
    assert "step 5: loss is nan, again after going back 2 times" in outcome.message
    assert [e["action"] for e in running.events("loss")] == ["rollback", "rollback", "stop"]


def test_a_bad_batch_is_left_out_when_going_back_did_not_help(tmp_path: Path) -> None:
    args = ["--bad", "5", "--then", "skip", "--pace", "0.02"]
    outcome, running, _ = guarded(tmp_path, "bad", *args)
    assert outcome.ok, outcome.message
    assert [e["action"] for e in running.events("loss")] == ["rollback", "rollback", "skip"]


def test_a_script_started_by_hand_goes_back_as_well(tmp_path: Path, calm: str) -> None:
    assert by_hand(tmp_path, "--bad=5:1", "--pace", "0.02") == calm
    assert (tmp_path / "count").read_text() == "x"
