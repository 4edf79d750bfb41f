"""``holdfast plan``: what it prints, writes, and refuses, and what it takes from runs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import ckpt
from holdfast.ckpt.events import CheckpointDone
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import GenerationProposed, JobStarted, StepDone, StepProtected
from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.tools import cli
from holdfast.tools.plan.forecast import alternatives, best, memory
from holdfast.tools.plan.job import PlannedJob
from holdfast.tools.plan.reading import known_numbers
from holdfast.tools.plan.reasons import chance, reasons, share, span

WORDS = ("--params", "7B", "--nodes", "16", "--step-s", "4")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def job(**changes: Any) -> PlannedJob:
    values = {"state_bytes": 84 * 10**9, "nodes": 16, "step_s": 4.0, "node_mtbf_s": 264 * 86400.0}
    return PlannedJob(**(values | changes))


def test_the_table_names_intervals_memory_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *WORDS, "--memory", "40GiB"]) == 0
    said = capsys.readouterr().out
    for words in (
        "78.2 GiB of state on 16 nodes of 8; one node fails every 16.5 days",
        "goodput",
        "parity 1 *",
        "whole copies",
        "Young's interval is",
        "It fits the memory",
    ):
        assert words in said


def test_json_has_the_plan_its_alternatives_and_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = planned(capsys, *WORDS)
    assert [each["parity"] for each in found["alternatives"]] == [0, 1, 2, 3, "replicate"]
    assert found["plan"]["loss_at_once"] == {"2": pytest.approx(7 / 15)}
    plan = found["plan"]
    assert plan == found["alternatives"][1]
    assert plan["goodput"] + sum(plan["costs"].values()) == pytest.approx(1.0)
    assert 0 < plan["loss_within_job"] < plan["loss_within_year"] < 0.05
    given = planned(capsys, *WORDS, "--snapshot-every", "3", "--checkpoint-every", "300")["plan"]
    assert (given["snapshot_every"], given["checkpoint_every"]) == (3, 300)
    assert given["goodput"] <= plan["goodput"]


def test_the_picture_is_a_document_with_a_curve_for_each_parity(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(capsys, *WORDS, "--svg", "plan.svg")
    root = ET.fromstring((here / "plan.svg").read_text())
    paths = [each for each in root.iter() if each.tag.endswith("path")]
    assert len(paths) == 5
    assert "own" in str(paths[-1].get("class")), "the plan's own lies on top"


def test_one_node_has_no_parity(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--state", "10GiB", "--nodes", "1", "--step-s", "2")
    assert [each["parity"] for each in found["alternatives"]] == [0]
    assert found["plan"]["loss_within_year"] > 0.5


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--nodes", "4"]) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert "give --params N or --state SIZE, --step-s S, or --from PATH" in said


@pytest.mark.parametrize(
    "words",
    [
        ("--params", "7X"),
        ("--params", "0"),
        ("--mtbf", "7"),
        ("--mtbf", "0d"),
        ("--network", "fast"),
        ("--frozen", "1"),
        ("--parity", "one"),
        ("--recovery-s", "-1"),
    ],
)
def test_a_wrong_number_is_refused(words: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", *WORDS, *words])
    assert end.value.code == cli.EXIT_USAGE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 1}, "a group needs more nodes than may be lost"),
        ({"parity": 8}, "give group=9 or more"),
        ({"racks": 17, "rack_mtbf_s": 1.0}, "give no more racks"),
        ({"racks": 4}, "give both"),
        ({"rack_mtbf_s": 4.0}, "give both"),
        ({"feeds": 4}, "give both"),
        ({"feeds": 17, "feed_mtbf_s": 4.0}, "there are 16 nodes; give no more feeds"),
        (
            {"feeds": 5, "feed_mtbf_s": 4.0, "racks": 4, "rack_mtbf_s": 4.0},
            "there are 4 racks; give no more feeds",
        ),
        ({"moving": 0.0}, "give a share above 0"),
        ({"step_s": float("nan")}, "give a number of seconds above 0"),
    ],
)
def test_numbers_that_no_job_can_have_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(**changes)


@pytest.mark.parametrize("nodes", [2, 5, 8, 12, 17, 24])
@pytest.mark.parametrize("parity", [0, 1, "replicate"])
def test_memory_by_groups_is_that_of_the_whole_job(nodes: int, parity: Any) -> None:
    found = memory(job(nodes=nodes, parity=parity, workers=2, state_bytes=nodes << 24))
    whole = holdfast.memory_need(1 << 23, nodes=nodes, ranks_per_node=2, parity=parity)
    assert (found.total, found.lent) == (whole.total, whole.lent)


def test_a_large_job_is_planned_at_once() -> None:
    found = alternatives(job(nodes=10_000, state_bytes=10**13))
    assert len(found) == 5


def test_snapshots_are_no_faster_than_protection() -> None:
    found = best(job(protect_s=30.0, snapshot_cost_s=0.0))
    assert found.intervals.snapshot == 8
    assert "protecting a step takes 30s, so no shorter one works" in reasons(found, [found])[0]


def test_racks_that_hold_too_many_nodes_of_a_group_are_told() -> None:
    found = best(job(racks=2, rack_mtbf_s=5 * 365 * 86400.0))
    assert found.rates.fatal_racks == 2
    assert any("Every rack holds more than 1 nodes" in line for line in reasons(found, [found]))
    spread = best(job(racks=16, rack_mtbf_s=5 * 365 * 86400.0))
    assert spread.rates.fatal_racks == 0
    fed = best(job(racks=8, rack_mtbf_s=1e9, feeds=2, feed_mtbf_s=1e9))
    assert (fed.rates.fatal_racks, fed.rates.fatal_feeds) == (0, 2)
    assert any("Every power feed holds more than 1 nodes" in x for x in reasons(fed, [fed]))


def test_a_better_parity_and_a_lack_of_memory_are_told() -> None:
    found = best(job(parity=0, nodes=512))
    others = alternatives(found.job)
    said = reasons(found, others, budget=1 << 20)
    assert any("It does not fit: a node needs" in line for line in said)
    assert not any("would be better" in line for line in said)
    assert "parity=1 would be better" in reasons(found, others)[-1]
    tight = found.memory.total
    assert "without the lent slots" in reasons(found, others, budget=tight)[3]


def test_a_job_that_never_ends_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--params", "1T", "--nodes", "4000", "--step-s", "60", "--mtbf", "1h")
    assert cli.main(["plan", *words]) == cli.EXIT_FAILED
    assert "The job would not end" in capsys.readouterr().out


def test_a_checkpoint_tells_the_size_of_the_state(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt.save(here / "saved", {"w": torch.zeros(1000, 10)}, step=3)
    found = planned(capsys, "--from", "saved", "--nodes", "4", "--step-s", "1")
    assert found["from"].startswith("state of step 3 in ")
    assert known_numbers("saved").values == {"state_bytes": 40_000}


def test_a_run_tells_its_sizes_and_times(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = here / "run"
    run.mkdir()
    writer = EventWriter(events_file(run, "n0"), node="n0")
    seats = ("n0/trainer/0", "n0/trainer/1", "n1/trainer/2", "n1/trainer/3")
    for event in (
        JobStarted(run="r", nodes=("n0", "n1")),
        GenerationProposed(generation=1, ranks=seats),
        *(StepDone(step=n, seconds=float(n)) for n in (1, 2, 3)),
        StepProtected(generation=1, step=1, seconds=0.5),
        CheckpointDone(step=3, seconds=2.0, bytes=10**9, bytes_per_s=5 * 10**8),
    ):
        writer.write(event, source="test")
    writer.close()
    assert known_numbers(str(run)).values == {
        "step_s": 2.0,
        "nodes": 2,
        "workers": 2,
        "protect_s": 0.5,
        "state_bytes": 10**9,
        "store": 5e8,
    }
    found = planned(capsys, "--from", "run", "--nodes", "8")
    assert found["plan"]["parity"] == 1
    assert "from the events in run" in found["from"]


def test_a_run_without_steps_is_refused(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "events-n0.jsonl").touch()
    with pytest.raises(ConfigError, match="no step was completed there; give --step-s"):
        known_numbers("run")


def test_numbers_are_written_for_people() -> None:
    assert [span(x) for x in (0.002, 90, 86400 * 800, 86400 * 20, float("inf"))] == [
        "2ms",
        "1.5m",
        "2.19 years",
        "20 days",
        "never",
    ]
    assert [chance(x) for x in (1.0, 0.25, 1 / 1312, 1e-7, 0.0)] == [
        "almost certain",
        "25.0%",
        "1 in 1,300",
        "1 in 1.0e+07",
        "less than 1 in 1e15",
    ]
    assert [share(x) for x in (0.5, 0.0, 1e-7)] == ["50.00%", "0.00%", "1e-07"]
