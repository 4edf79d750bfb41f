"""Two machines lost one after the other, with and without the time to protect the state again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs import Event, Job, launched

from elastic.launch import LOCAL_TIMING, LaunchConfig, NodeSpec, python_command

SCRIPT = Path(__file__).with_name("tiny_training.py")
STEPS = 60
TRAINERS, OTHERS = ("n0", "n1"), ("n2", "n3")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of the run that nothing happened to."""
    result = tmp_path_factory.mktemp("alone") / "result.json"
    words = [sys.executable, SCRIPT, "--result", result, "--steps", STEPS]
    subprocess.run([str(word) for word in words], check=True, timeout=60)
    return outcome_in(result.parent)


def outcome_in(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


@contextmanager
def training(directory: Path, *flags: object) -> Iterator[Job]:
    """Two trainers on two nodes, and two more nodes that only guard the snapshots."""
    words = ["--result", directory / "result.json", "--steps", STEPS, "--pace", 0.03, *flags]
    config = LaunchConfig(
        command=python_command(SCRIPT, [str(word) for word in words]),
        nodes=(
            *(NodeSpec(name=name, domain=name, slots={"trainer": 1}) for name in TRAINERS),
            *(NodeSpec(name=name, domain=name, slots={}) for name in OTHERS),
        ),
        wanted={"trainer": len(TRAINERS)},
        run_dir=directory / "run",
        timing=msgspec.structs.replace(LOCAL_TIMING, stop_timeout_s=2.0),
        node_restarts=0,
    )
    with launched(config) as running:
        yield running


def lose(job: Job, node: str) -> Event:
    """Take a machine away and return the generation that goes on without it."""
    before = max(event["generation"] for event in job.events("proposed"))
    assert job.launcher.lose_machine(node)
    return job.await_event(lambda e: e["kind"] == "proposed" and e["generation"] > before)


def ended(job: Job, directory: Path) -> dict[str, Any]:
    outcome = job.finish()
    assert outcome.ok, outcome.message
    return outcome_in(directory)


def test_a_second_loss_after_the_state_is_protected_again_is_survived(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    with training(tmp_path) as job:
        job.await_event(lambda e: e["kind"] == "protected" and e["step"] >= 5)
        first = lose(job, "n0")
        assert first["restore_how"] == "parity"
        assert first["restore_step"] >= 5
        again = job.await_event(
            lambda e: e["kind"] == "protected" and e["generation"] == first["generation"]
        )
        assert again["step"] >= first["restore_step"]
        second = lose(job, "n2")
        assert second["restore_how"] in ("memory", "parity")
        assert second["restore_step"] >= again["step"], "what was protected again is not lost"
        assert ended(job, tmp_path) == undisturbed
    tiers = {e["generation"]: e["tier"] for e in job.events("restored")}
    assert tiers[first["generation"]] == "parity"


def test_a_second_loss_before_that_goes_on_from_the_old_fragments_where_they_suffice(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    hold = tmp_path / "go"
    with training(tmp_path, "--parity", 2, "--hold", hold) as job:
        job.await_event(lambda e: e["kind"] == "protected" and e["step"] >= 5)
        first = lose(job, "n0")
        second = lose(job, "n2")
        assert second["restore_step"] == first["restore_step"] >= 5
        assert second["restore_how"] == "parity"
        hold.touch()
        assert ended(job, tmp_path) == undisturbed
    restored = [e for e in job.events("restored") if e["generation"] == second["generation"]]
    assert [(e["tier"], e["step"]) for e in restored] == [("parity", second["restore_step"])]


def test_a_second_loss_before_that_and_too_much_for_parity_takes_the_checkpoint(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    hold, root, every = tmp_path / "go", tmp_path / "saved", STEPS // 2
    flags = ("--checkpoint", root, "--checkpoint-every", every, "--pace", 0.1)
    with training(tmp_path, "--hold", hold, *flags) as job:
        saved = job.await_event(lambda e: e["kind"] == "checkpoint_done")
        # nothing is being written any more: what is carried over is rebuilt, and then not lost
        job.await_event(lambda e: e["kind"] == "protected" and e["step"] > saved["step"])
        lose(job, "n0")
        second = lose(job, "n2")
        assert second["restore_step"] is None
        assert "restores nothing from memory" in second["reason"]
        assert "fragments it needs" in second["reason"], "why not"
        assert re.search(r"the newest checkpoint is loaded, step \d+, or", second["reason"])
        hold.touch()
        assert ended(job, tmp_path) == undisturbed
    (restored,) = (e for e in job.events("restored") if e["generation"] == second["generation"])
    assert restored["tier"] == "checkpoint"
    assert restored["step"] == saved["step"] == every
    assert restored["bytes"] > 0
