"""Scenarios of islands: what is for them, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.tools.chaos.real.islands.job import workload_of
from holdfast.tools.chaos.runs import ScenarioRuns
from holdfast.tools.chaos.scenarios.scenario import SEA, Scenario, ScenarioError, parse

KILL: dict[str, Any] = {"kind": "kill", "target": {"part": "island"}, "when": {"step": 1}}


def scenario(*faults: dict[str, Any], **load: Any) -> Scenario:
    found = {
        "command": ["true"],
        "nodes": {"a": {"trainer": 1}},
        "islands": {"lima": [], "oslo": []},
    }
    return parse(
        {"name": "s", "about": "", "workload": {**found, **load}, "fault": faults or (KILL,)},
        source="s.toml",
    )


def test_each_island_has_its_words_its_name_and_the_meeting_place(tmp_path: Path) -> None:
    load = scenario(
        islands={"lima": ["--steps", "3"], "oslo": []},
        absent=["oslo"],
        settings={"islands": {"founders": 2}},
    ).workload
    own = workload_of(load, "lima", work=tmp_path)
    assert own.command == ("true", "--steps", "3")
    assert own.settings == {"islands": {"founders": 2, "name": "lima", "meet": str(tmp_path / SEA)}}
    assert not own.islands and not own.absent


@pytest.mark.parametrize(
    ("load", "says"),
    [
        ({"nodes": {}}, "give nodes"),
        ({"islands": {}, "absent": ["rome"]}, "no island rome"),
        ({"absent": ["lima", "oslo"]}, "let one begin"),
        ({"islands": {"a/b": []}}, "no name of an island"),
        ({"coordinator": "etcd"}, "embedded coordinators, not etcd"),
        ({"spares": 1}, "not for islands"),
        ({"return_s": 60.0}, "not for islands"),
        ({"islands": {}}, "there are no islands"),
    ],
)
def test_a_workload_that_islands_cannot_have_is_refused(load: dict[str, Any], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        scenario(**load)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"kind": "flip-slot"}, "not hit so; choose from"),
        ({"kind": "kill", "target": {"part": "launcher"}}, "'launcher' is not for islands"),
        ({"kind": "kill", "target": {"part": "job"}}, "'job' is not for islands"),
        ({"kind": "kill", "target": {"part": "worker", "rank": 0}}, "of one run"),
        ({"kind": "kill", "target": {"part": "worker", "which": "leader"}}, "of one run"),
    ],
)
def test_a_fault_that_is_not_for_islands_is_refused(fault: dict[str, Any], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        scenario({**fault, "when": {"step": 1}})


def test_islands_are_not_simulated() -> None:
    with pytest.raises(ScenarioError, match="runs of real processes"):
        ScenarioRuns(scenario(), Path("s.toml"), name="s", world="simulated", tell=print)
