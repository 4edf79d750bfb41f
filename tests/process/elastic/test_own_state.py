"""A rank's own state goes on where it was: after a loss, in other worlds, from a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked_scripts import ran
from jobs import PATIENT, PRELOAD, Job, hurt, launched
from own_state_training import expected
from tree import HELPERS

from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command

SCRIPT = HELPERS / "own_state_training.py"


def config(folder: Path, name: str, *flags: str, nodes: int) -> LaunchConfig:
    names = [f"n{i}" for i in range(nodes)]
    return LaunchConfig(
        command=python_command(SCRIPT, ["--log", str(folder / "log"), *flags]),
        nodes=tuple(NodeSpec(name=n, domain=n, slots={"trainer": 1}) for n in names),
        wanted={"trainer": nodes},
        run_dir=folder / name,
        timing=PATIENT,
        preload=PRELOAD,
    )


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (folder / "log").read_bytes().splitlines()]


def ends(folder: Path) -> list[dict[str, Any]]:
    """Return the last line of every rank that came to the end, and check its game."""
    found = sorted(
        (line for line in lines_of(folder) if "seat" in line), key=lambda line: line["rank"]
    )
    for line in found:
        assert line["game"] == expected(line["seat"], line["turns"]), line
        assert line["best"][1] == "float32"
    return found


def turns_by_events(job: Job, seats: int) -> list[int]:
    """Return how many of the steps that counted were made in worlds that had each seat."""
    steps = job.events("step")
    last: dict[int, int] = {}
    worlds: dict[int, set[int]] = {}
    for event in steps:
        last[event["step"]] = max(event["generation"], last.get(event["step"], 0))
        worlds.setdefault(event["generation"], set()).add(event["rank"])
    return [sum(seat in worlds[number] for number in last.values()) for seat in range(seats)]


def test_no_turn_is_lost_or_played_twice_when_a_rank_dies_and_comes_back(tmp_path: Path) -> None:
    until = tmp_path / "until"
    steps = ["--steps", "24", "--until", str(until)]
    with launched(config(tmp_path, "run", *steps, nodes=3)) as job:
        job.await_step(4)
        hurt(job.worker("trainer/1"))
        fewer = job.await_event(lambda e: e["kind"] == "proposed" and e["generation"] > 1)
        job.world_of(3, after=job.history.index(fewer))
        until.touch()
        assert job.finish().ok, job.history[-20:]
        found = ends(tmp_path)
        assert [line["seat"] for line in found] == [0, 1, 2]
        assert [line["turns"] for line in found] == turns_by_events(job, 3)
        assert found[0]["best"][0] == 24
    built = [line["built"] for line in lines_of(tmp_path) if "built" in line]
    assert len(built) >= 4
    assert all(each == built[0] for each in built), (
        "the function is built alike, by every generator"
    )


@pytest.mark.exhaustive
def test_games_come_back_from_a_checkpoint_into_worlds_of_other_sizes(tmp_path: Path) -> None:
    root = str(tmp_path / "ckpt")
    for count, (nodes, steps, seats) in enumerate(
        ((3, 4, [4, 4, 4]), (2, 6, [6, 6]), (1, 7, [7]), (3, 9, [9, 8, 6]))
    ):
        (tmp_path / "log").unlink(missing_ok=True)
        flags = ("--steps", str(steps), "--checkpoint", root)
        if nodes == 1:
            alone = [sys.executable, str(SCRIPT), "--log", str(tmp_path / "log"), *flags]
            ran(alone, check=True)
        else:
            with launched(config(tmp_path, f"run{count}", *flags, nodes=nodes)) as job:
                assert job.finish().ok, job.history[-20:]
                told_ranks = {e["rank"]: e["per_rank"] for e in job.events("restored")}
            if nodes == 2:
                assert told_ranks == {
                    0: {"carried": ["game@2"], "dropped": ["dice@2"]},
                    1: {},
                }
            elif count:
                assert told_ranks == {0: {}, 1: {"built": ["dice"]}, 2: {"built": ["dice"]}}
        found = ends(tmp_path)
        assert [line["turns"] for line in found] == seats, (nodes, found)
        assert [line["seat"] for line in found] == list(range(nodes))
        assert {line["best"][0] for line in found} == {steps}


def test_a_tensor_that_differs_between_ranks_ends_the_job_with_both_named(tmp_path: Path) -> None:
    with launched(config(tmp_path, "run", "--steps", "5", "--differ", nodes=2)) as job:
        outcome = job.finish()
    assert not outcome.ok
    assert "noise differs between rank 0 and rank 1 as it was built" in outcome.message
    assert "holdfast.PerRank" in outcome.message
