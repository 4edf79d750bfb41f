"""Scenarios of policies with runs of their own: what is for them, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.tools.chaos.real.islands.job import workload_of
from holdfast.tools.chaos.runs import ScenarioRuns
from holdfast.tools.chaos.scenarios.scenario import CAST, Scenario, ScenarioError, parse

KILL: dict[str, Any] = {"kind": "kill", "target": {"part": "policy"}, "when": {"step": 1}}


def scenario(*faults: dict[str, Any], **load: Any) -> Scenario:
    found = {
        "command": ["true"],
        "nodes": {"a": {"trainer": 1}},
        "policies": {"solver": {"b": {"rollout": 2}}, "critic": {}},
    }
    return parse(
        {"name": "s", "about": "", "workload": {**found, **load}, "fault": faults or (KILL,)},
        source="s.toml",
    )


def test_each_run_has_its_policy_its_nodes_and_the_place_where_they_meet(tmp_path: Path) -> None:
    load = scenario(settings={"snapshots": {"parity": 1}}).workload
    lead, other = (workload_of(load, name, work=tmp_path) for name in load.runs)
    assert lead.command == ("true", "--policy", "solver", "--join", str(tmp_path / CAST))
    assert other.command == ("true", "--policy", "critic", "--join", str(tmp_path / CAST))
    assert lead.nodes == {"a": {"trainer": 1}, "b": {"rollout": 2}}
    assert other.nodes == {"a": {"trainer": 1}}
    assert lead.settings == load.settings and not lead.policies


@pytest.mark.parametrize(
    ("load", "says"),
    [
        ({"nodes": {}}, "give nodes"),
        ({"policies": {"solver": {}}}, "give two or more"),
        ({"policies": {"solver": {"a": {"rollout": 1}}, "critic": {}}}, "node a is among nodes"),
        ({"islands": {"lima": [], "oslo": []}}, "two kinds of jobs"),
        ({"coordinator": "etcd"}, "embedded coordinators, not etcd"),
        ({"spares": 1}, "not for runs of policies"),
        ({"return_s": 60.0}, "not for runs of policies"),
        ({"policies": {}}, "there are no policies"),
        ({"absent": ["critic"]}, "no island critic"),
    ],
)
def test_a_workload_that_policies_cannot_have_is_refused(load: dict[str, Any], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        scenario(**load)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"kind": "sea-cut", "target": {"part": "island"}}, "there are no islands"),
        ({"kind": "flip-slot"}, "not hit so; choose from"),
        ({"kind": "kill", "target": {"part": "launcher"}}, "'launcher' is not for policies"),
        ({"kind": "kill", "target": {"part": "job"}}, "'job' is not for policies"),
        ({"kind": "kill", "target": {"part": "worker", "rank": 0}}, "a policy, or a node as cri"),
        ({"kind": "kill", "target": {"part": "worker", "which": "slowest"}}, "of one run"),
    ],
)
def test_a_fault_that_is_not_for_policies_is_refused(fault: dict[str, Any], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        scenario({**fault, "when": {"step": 1}})


def test_a_worker_may_be_hit_by_its_role() -> None:
    target = {"part": "worker", "role": "rollout"}
    found = scenario({"kind": "kill", "target": target, "when": {"step": 1}})
    assert found.fault[0].target.role == "rollout"


def test_policies_are_not_simulated() -> None:
    with pytest.raises(ScenarioError, match=r"workload\.policies: they are runs of real processes"):
        ScenarioRuns(scenario(), Path("s.toml"), name="s", world="simulated", tell=print)
