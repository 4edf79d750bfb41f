"""Scenarios with a plain job without torch: struck, judged, shrunk, ended."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tree import HELPERS, ROOT

from holdfast.elastic.events import FaultInjected, FaultOver, of_kind
from holdfast.elastic.events.log import EventReader
from holdfast.tools.chaos import real
from holdfast.tools.chaos.judging.history import HookReader
from holdfast.tools.chaos.judging.record import StepCommit
from holdfast.tools.chaos.judging.result import Result, load
from holdfast.tools.chaos.real.jobs import alive
from holdfast.tools.chaos.scenarios.scenario import Scenario, parse
from holdfast.tools.cli import main

JOB = HELPERS / "plain_job.py"
LEAVES = f"""
import sys
from pathlib import Path
sys.path.append({str(ROOT / "tests")!r})
from doubles.checkpoints import sample_arrays, write_checkpoint
write_checkpoint(sys.argv[1], sample_arrays(), step=5)
(folder,) = Path(sys.argv[1]).glob("step-*")
(folder / "data" / "stray.pack").write_bytes(b"nobody refers to it")
"""


def scenario(*words: str, faults: list[dict[str, Any]], **more: Any) -> Scenario:
    command = ["{python}", str(JOB), "{folder}", *words]
    document = {"name": "plain", "about": "", "workload": {"command": command}, "lifetime_s": 200.0}
    return parse({**document, "fault": faults, **more}, source="test")


def kill(when: dict[str, Any], **target: Any) -> dict[str, Any]:
    return {"kind": "kill", "target": {"part": "worker", **target}, "when": when}


def named(result: Result) -> list[tuple[int, str, str, bool]]:
    return [(each.number, each.kind, each.victim, each.missed) for each in result.struck]


def longest_pause_s(folder: Path, rank: int) -> float:
    commits = of_kind(HookReader(folder / "history").new(), StepCommit)
    times = [commit.t for commit in commits if commit.rank == rank]
    return max(after - before for before, after in pairwise(times))


def test_a_job_that_goes_on_where_it_stood_holds(tmp_path: Path) -> None:
    faults = [
        kill({"step": 4}, rank=1),
        kill({"recovery": "restarted"}, count=2),
        {"kind": "kill", "target": {"part": "job"}, "when": {"step": 12}},
        {
            "kind": "stop",
            "target": {"part": "worker", "rank": 0},
            "when": {"step": 18},
            "lasts_s": 0.5,
        },
    ]
    gates = ["--gate=7:0", "--gate=10:1", "--gate=14:2", "--gate=21:3"]
    result = real.run(scenario(*gates, faults=faults), folder=tmp_path)
    assert result.held, (result.verdict.violations, result.problems)
    hits = [each for each in named(result) if not each[-1]]
    assert hits[0] == (0, "kill", "worker/1", False)
    assert {each[:2] for each in hits} == {(0, "kill"), (1, "kill"), (2, "kill"), (3, "stop")}
    assert (2, "kill", "the job", False) in hits
    assert hits[-1] == (3, "stop", "worker/0", False)
    assert result.verdict.attempts == 4
    assert result.verdict.steps == 24
    assert {"samples of the reference", "state of the reference"} <= set(result.verdict.checked)
    assert longest_pause_s(tmp_path, 0) > 0.4
    assert load(tmp_path) == result
    assert len(json.loads((tmp_path / "strikes.json").read_text())) == len(faults)
    events = EventReader(tmp_path / "history").new()
    assert [fault.number for fault in of_kind(events, FaultInjected)].count(0) == 1
    over = [event.what for event in of_kind(events, FaultOver)]
    assert over == ["stop of worker/0"]


def test_a_job_that_forgets_its_data_is_broken_and_the_fault_that_does_it_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "forgetful.toml"
    file.write_text(
        f"""
        name = "forgetful"
        about = "a job that begins its data again"
        seed = 3
        lifetime_s = 200
        [workload]
        command = [
            "{{python}}", "{JOB}", "{{folder}}", "--forgets",
            "--gate=5:0", "--gate=9:1", "--gate=12:2",
        ]
        [[fault]]
        kind = "stop"
        when.step = 2
        lasts_s = 0.1
        [[fault]]
        kind = "kill"
        target.part = "worker"
        when.step = 6
        [[fault]]
        kind = "slow"
        when.step = 8
        lasts_s = 0.2
        amount = 0.5
        """
    )
    out = tmp_path / "out"
    assert main(["chaos", "run", str(file), "--out", str(out), "--shrink", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    broken = {each["check"] for each in found["verdict"]["violations"]}
    assert {"samples once", "samples of the reference", "state of the reference"} <= broken
    assert found["replay"] == f"holdfast chaos run {file} --seed 3"
    assert found["smallest"]["only"] == [1]
    assert found["smallest"]["replay"] == f"{found['replay']} --only 1"
    smallest = load(out / "smallest")
    assert smallest.only == (1,) and not smallest.held
    assert (out / "scenario.toml").read_text() == file.read_text()


def test_a_stuck_job_is_ended_and_its_stacks_are_kept(tmp_path: Path) -> None:
    found = real.run(
        scenario(
            "--hangs", faults=[kill({"step": 2})], lifetime_s=6.0, checks={"undisturbed": False}
        ),
        folder=tmp_path,
    )
    (stuck,) = found.problems
    assert stuck.startswith("stuck: it had not ended after 6 s")
    output = (tmp_path / "work" / "output.log").read_text()
    stacks = tmp_path / "stacks.txt"
    assert "in train" in output or "train (" in stacks.read_text()
    assert not found.held


def test_what_a_job_leaves_behind_is_told_and_ended(tmp_path: Path) -> None:
    found = real.run(
        scenario("--leaves", "--steps=2", faults=[], checks={"undisturbed": False}), folder=tmp_path
    )
    (left,) = found.problems
    assert left.startswith("left behind: process ") and left.strip().endswith("sleep 60")
    assert not alive([int(left.split()[3].rstrip(":"))])


def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    checks = {"undisturbed": False}
    found = real.run(scenario("--no-such", faults=[], checks=checks), folder=tmp_path)
    failed = next(each for each in found.problems if each.startswith("the job failed"))
    assert "exit status 2" in failed
    assert failed.endswith("unrecognized arguments: --no-such")


def test_a_stray_file_among_the_checkpoints_is_told(tmp_path: Path) -> None:
    command = ["{python}", "-c", LEAVES, "{folder}/saved"]
    document = {"name": "leaves", "about": "", "workload": {"command": command}, "lifetime_s": 60.0}
    leaves = parse({**document, "checks": {"undisturbed": False}}, source="test")
    result = real.run(leaves, folder=tmp_path)
    stray = tmp_path / "work" / "saved" / "step-000000000005" / "data" / "stray.pack"
    assert not result.held
    assert f"left behind: {stray}: no committed step refers to it" in result.problems
