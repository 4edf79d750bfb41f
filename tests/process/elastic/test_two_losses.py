"""Two machines lost one after the other, with and without time to protect the state in between."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forked_scripts import ran
from jobs import DEADLINE_S, PATIENT, PRELOAD, Event, Job, launched
from tree import HELPERS

from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command

SCRIPT = HELPERS / "tiny_training.py"
STEPS, GATE = 20, 10
TRAINERS, OTHERS = ("n0", "n1"), ("n2", "n3")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of the run that nothing happened to."""
    result = tmp_path_factory.mktemp("alone") / "result.json"
    words = [sys.executable, SCRIPT, "--result", result, "--steps", STEPS]
    ran(words, check=True)
    return outcome_in(result.parent)


def outcome_in(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


@contextmanager
def training(directory: Path, *flags: object) -> Iterator[Job]:
    """Two trainers on two nodes, and two more nodes that only guard the snapshots.

    Having completed step `GATE` they wait for `go_on`, so the newest snapshot is that one.
    """
    words = ["--result", directory / "result.json", "--steps", STEPS]
    words += ["--gate", GATE, directory / "go", *flags]
    config = LaunchConfig(
        command=python_command(SCRIPT, [str(word) for word in words]),
        nodes=(
            *(NodeSpec(name=name, domain=name, slots={"trainer": 1}) for name in TRAINERS),
            *(NodeSpec(name=name, domain=name, slots={}) for name in OTHERS),
        ),
        wanted={"trainer": len(TRAINERS)},
        run_dir=directory / "run",
        timing=PATIENT,
        preload=PRELOAD,
        node_restarts=0,
    )
    with launched(config) as running:
        yield running


def await_protected(job: Job, *nodes: str) -> None:
    """Wait until the newest generation has protected the step at the gate, as all sidecars say."""
    generation = max(event["generation"] for event in job.events("proposed"))
    key = RunKey.load(job.launcher.run_dir / "key.json")
    for node in nodes:
        client = SidecarClient(job.launcher.processes()[node].address, key)
        with contextlib.closing(client):
            protected = client.protected_step(
                generation=generation, at_least=GATE, timeout_s=DEADLINE_S
            )
            assert protected == GATE, f"{node} in generation {generation}"


def at_the_gate(job: Job, *nodes: str) -> None:
    """Wait until the step at the gate is complete and protected."""
    job.await_step(GATE)
    await_protected(job, *nodes)


def lose(job: Job, node: str) -> Event:
    """Take a machine away and return the generation that goes on without it."""
    before = max(event["generation"] for event in job.events("proposed"))
    assert job.launcher.lose_machine(node)
    return job.await_event(lambda e: e["kind"] == "proposed" and e["generation"] > before)


def ended(job: Job, directory: Path) -> dict[str, Any]:
    (directory / "go").touch()
    outcome = job.finish()
    assert outcome.ok, outcome.message
    return outcome_in(directory)


def test_what_each_replica_reads_of_the_other_is_in_the_reason(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        at_the_gate(job, *TRAINERS, *OTHERS)
        said = re.search(
            r"; restores .*, 0 of (\d+) bytes move, and about (\d+) more so that every "
            "replica has what is replicated$",
            lose(job, "n3")["reason"],
        )
        assert said
        total_bytes, more_bytes = map(int, said.groups())
        assert 0.8 * total_bytes < more_bytes <= total_bytes  # half of it for each of the two


def test_a_second_loss_after_the_state_is_protected_again_is_survived(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    with training(tmp_path) as job:
        at_the_gate(job, *TRAINERS, *OTHERS)
        first = lose(job, "n0")
        assert (first["restore_how"], first["restore_step"]) == ("parity", GATE)
        await_protected(job, "n1", *OTHERS)
        second = lose(job, "n2")
        assert second["restore_how"] in ("memory", "parity")
        assert second["restore_step"] == GATE, "what was protected again is not lost"
        assert ended(job, tmp_path) == undisturbed
    tiers = {e["generation"]: e["tier"] for e in job.events("restored")}
    assert tiers[first["generation"]] == "parity"


def test_a_second_loss_before_that_goes_on_from_the_old_fragments_where_they_suffice(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    with training(tmp_path, "--parity", 2, "--hold", tmp_path / "go") as job:
        at_the_gate(job, *TRAINERS, *OTHERS)
        first = lose(job, "n0")
        second = lose(job, "n2")
        assert second["restore_step"] == first["restore_step"] == GATE
        assert second["restore_how"] == "parity"
        assert ended(job, tmp_path) == undisturbed
    restored = [e for e in job.events("restored") if e["generation"] == second["generation"]]
    assert [(e["tier"], e["step"]) for e in restored] == [("parity", GATE)]


def test_a_second_loss_before_that_and_too_much_for_parity_takes_the_checkpoint(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    every = GATE - 2
    flags = ("--checkpoint", tmp_path / "saved", "--checkpoint-every", every)
    with training(tmp_path, "--hold", tmp_path / "go", *flags) as job:
        # nothing is being written any more: what is carried over is rebuilt, and then not lost
        job.await_event(lambda e: e["kind"] == "checkpoint_done")
        at_the_gate(job, *TRAINERS, *OTHERS)
        lose(job, "n0")
        second = lose(job, "n2")
        assert second["restore_step"] is None
        assert "restores nothing from memory" in second["reason"]
        assert "fragments it needs" in second["reason"], "why not"
        assert re.search(r"the newest checkpoint is loaded, step \d+, or", second["reason"])
        assert ended(job, tmp_path) == undisturbed
    (restored,) = (e for e in job.events("restored") if e["generation"] == second["generation"])
    assert (restored["tier"], restored["step"]) == ("checkpoint", every)
    assert restored["bytes"] > 0
