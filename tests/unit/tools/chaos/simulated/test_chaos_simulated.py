"""A scenario on virtual time: supported entries, moments, victims, reports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tree import ROOT

from holdfast.tools.chaos import reading
from holdfast.tools.chaos.judging import history
from holdfast.tools.chaos.judging.result import load
from holdfast.tools.chaos.scenarios.catalogue import CATALOGUE
from holdfast.tools.chaos.scenarios.scenario import Scenario, ScenarioError, parse
from holdfast.tools.chaos.scenarios.strikes import draw
from holdfast.tools.chaos.simulated import run
from holdfast.tools.chaos.simulated.translate import KINDS, config_of
from holdfast.tools.chaos.simulated.world import SimulatedResult, simulate

NODES = {"left": {"trainer": 1}, "middle": {"trainer": 1}, "right": {"trainer": 1}}


def scenario(*faults: dict[str, Any], **more: Any) -> Scenario:
    document: dict[str, Any] = {
        "name": "tried",
        "about": "a test",
        "workload": {"command": ["train"], "nodes": NODES},
        "simulated": {"steps": 40},
        "checks": {"dense": True, "undone_most": 4},
        "lifetime_s": 60.0,
        "fault": list(faults),
    }
    return parse({**document, **more}, source="test")


def fault(kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "when": {"s": 1.0}, **more}


def simulated(wanted: Scenario, *, seed: int = 0) -> SimulatedResult:
    return simulate(wanted, draw(wanted, seed=seed), seed=seed)


@pytest.mark.parametrize(
    "each",
    [
        fault("kill"),
        fault("kill", target={"part": "sidecar"}),
        fault("kill", target={"part": "agent"}),
        fault("kill", target={"part": "node", "node": "right"}),
        fault("lose", lasts_s=2.0),
        fault("lose"),
        fault("stop", lasts_s=0.5),
        fault("stop", lasts_s=5.0),
        fault("stop", target={"part": "agent"}, lasts_s=2.0),
        fault("stop", target={"part": "coordinator"}, lasts_s=2.0),
        fault("hang"),
        fault("crash", lasts_s=1.0),
        fault("partition", lasts_s=2.0),
        fault("partition-in", lasts_s=2.0),
        fault("partition-out", lasts_s=2.0),
        fault("partition-pair", lasts_s=3.0),
        fault("coordinator-restart", lasts_s=1.0),
        fault("split", lasts_s=2.0),
        fault("weather", lasts_s=2.0, amount=0.8),
        fault("outage", lasts_s=1.0),
    ],
    ids=lambda each: f"{each['kind']}-{each.get('target', {}).get('part', '')}",
)
def test_job_survives_every_kind(each: dict[str, Any], tmp_path: Path) -> None:
    result = run(scenario(each), seed=1, folder=tmp_path)
    assert result.held, (result.problems, result.verdict.violations)
    assert [struck.missed for struck in result.struck] == [False]
    assert set(result.verdict.checked) > {"all steps", "samples of the reference", "bounded loss"}


def test_every_kind_that_the_catalogue_calls_simulated_is() -> None:
    wanted = {kind for kind, info in CATALOGUE.items() if "simulated" in info.worlds}
    assert wanted == {kind for kind, _ in KINDS} & CATALOGUE.keys()
    assert all(part in CATALOGUE[kind].parts for kind, part in KINDS)


def test_folder_has_what_real_runs_leave_there(tmp_path: Path) -> None:
    wanted = scenario(fault("lose", lasts_s=1.0), fault("kill", when={"s": 3.0}))
    result = run(wanted, seed=3, only=[0], folder=tmp_path)
    assert load(tmp_path) == result
    assert (result.world, result.seed, result.only) == ("simulated", 3, (0,))
    assert result.replay.endswith("scenario.toml --world simulated --seed 3 --only 0")
    strikes = msgspec.json.decode((tmp_path / "strikes.json").read_bytes())
    assert [each["number"] for each in strikes] == [0]
    hurt, calm = history.read(tmp_path / "history"), history.read(tmp_path / "calm")
    assert {commit.attempt for commit in calm.commits} == {1}
    assert len({commit.attempt for commit in hurt.commits}) > 1
    assert result.verdict.steps == len(calm.surviving) == 40
    events = [
        msgspec.json.decode(line) for line in (tmp_path / "history/events-simulated.jsonl").open()
    ]
    assert {"proposed", "fencing", "fenced", "restored", "fault"} <= {e["kind"] for e in events}
    assert next(e for e in events if e["kind"] == "fault")["what"] == "lose"


def test_equal_seeds_give_equal_runs(tmp_path: Path) -> None:
    wanted = scenario({"kind": "kill", "when": {"poisson_s": 1.0, "times": 0}}, lifetime_s=30.0)
    runs = [run(wanted, seed=7, folder=tmp_path / name) for name in "ab"]
    assert msgspec.structs.replace(runs[0], replay="") == msgspec.structs.replace(
        runs[1], replay=""
    )
    files = [(tmp_path / name / "history/history-simulated.jsonl").read_bytes() for name in "ab"]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("lost", "outcome"), [(("left",), "parity"), (("left", "middle", "right"), "checkpoint")]
)
def test_the_report_tells_where_a_job_that_lost_nodes_went_on_from(
    lost: tuple[str, ...], outcome: str, tmp_path: Path
) -> None:
    target = {"part": "node", "node": lost, "which": "all"}
    wanted = scenario(fault("lose", target=target, lasts_s=1.0, when={"step": 25}), checks={})
    assert run(wanted, seed=1, folder=tmp_path).held
    (reported,) = reading.read(tmp_path)
    assert [(loss.nodes, loss.of, loss.outcome) for loss in reported.losses] == [(lost, 3, outcome)]
    assert reported.verdict.undone == sum(each.steps_lost for each in reported.recoveries[:1])


def test_strikes_come_at_their_moments() -> None:
    found = simulated(
        scenario(
            fault("kill", when={"step": 10}, target={"node": "left"}),
            fault("kill", when={"recovery": "fenced"}, target={"part": "sidecar", "node": "right"}),
            fault("kill", when={"state": "protected", "after_s": 2.0}, target={"rank": 1}),
            fault("kill", when={"s": 500.0}),
        )
    )
    assert not found.problems
    struck = {each.number: each for each in found.struck}
    commits = found.telling.history.commits
    tenth = min(commit.t for commit in commits if commit.step == 10)
    assert struck[0].t == tenth
    assert struck[0].victim.startswith("trainer/")
    assert tenth < struck[1].t < tenth + 0.5
    assert struck[1].victim == "sidecar right"
    assert struck[2].t > commits[0].t - 0.1 + 2.0 - 1.0
    assert (struck[3].missed, struck[3].victim) == (True, "nobody")


def test_state_that_comes_again_sets_off_one_strike_each_time() -> None:
    found = simulated(
        scenario(fault("kill", when={"state": "restored", "times": 2}), fault("kill"))
    )
    times = sorted(each.t for each in found.struck)
    assert len(set(times)) == 3


@pytest.mark.parametrize(
    ("target", "victims"),
    [
        ({"which": "all", "part": "sidecar"}, {"sidecar left", "sidecar middle", "sidecar right"}),
        ({"which": "leader", "part": "node"}, {"node left"}),
        ({"node": "middle", "part": "node"}, {"node middle"}),
        ({"role": "rollout"}, {"nobody"}),
    ],
)
def test_targets_are_found(target: dict[str, Any], victims: set[str]) -> None:
    found = simulated(scenario(fault("kill", target=target)))
    assert {each.victim for each in found.struck} == victims


def test_count_of_a_target_are_hit_at_once() -> None:
    found = simulated(scenario(fault("kill", target={"count": 2})), seed=4)
    assert len({each.victim for each in found.struck}) == 2
    assert len({each.t for each in found.struck}) == 1


@pytest.mark.parametrize(
    ("each", "message"),
    [
        (fault("preempt"), "it is not simulated"),
        (fault("kill", target={"part": "coordinator"}), "of a part 'coordinator'"),
        (fault("kill", target={"which": "slowest"}), "no rank of a simulation is the slowest"),
        (fault("kill", when={"state": "stack"}), "no event 'stack'"),
    ],
)
def test_what_is_not_simulated_is_refused_with_the_remedy(
    each: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ScenarioError, match=rf"fault 1 .*{message}.*--world real"):
        run(scenario(each), seed=0, folder=tmp_path)


def test_job_without_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"workload\.nodes"):
        run(scenario(workload={"command": ["train"]}), seed=0, folder=tmp_path)


def test_slots_and_domains_are_those_of_the_nodes() -> None:
    nodes = {"a": {"trainer": 2}, "b": {"trainer": 1, "rollout": 1}}
    workload = {"command": ["train"], "nodes": nodes, "domains": {"b": "rack 2"}}
    config = config_of(scenario(workload=workload))
    assert config.wanted == {"rollout": 1, "trainer": 3}
    assert config.slots_of == {"n0": {"trainer": 2}, "n1": {"trainer": 1, "rollout": 1}}
    assert config.domains_of == {"n1": "rack 2"}


def test_job_that_cannot_go_on_is_told() -> None:
    found = simulated(
        scenario(fault("lose"), simulated={"steps": 40, "min_dp": 3}, lifetime_s=20.0)
    )
    assert any("did not end by 20" in each for each in found.problems)


def test_scenario_of_the_guide_holds(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "how-to" / "chaos.md").read_text()
    text = next(
        block
        for block in re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
        if "[simulated]" in block
    )
    wanted = parse(tomllib.loads(text), source="docs/how-to/chaos.md")
    for seed in range(3):
        result = run(wanted, seed=seed, folder=tmp_path / str(seed))
        assert result.held, (result.problems, result.verdict.violations)
        assert not any(each.missed for each in result.struck)
