"""The shipped scenarios, the kinds of faults, and their command line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection
from pathlib import Path

import pytest
from tree import ROOT

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.testing.shrinking import FailureOracle, fewest
from holdfast.tools.chaos.faults.registry import INJECTORS, for_kinds
from holdfast.tools.chaos.judging.checker import HistoryVerdict, Violation
from holdfast.tools.chaos.judging.result import Result, Struck
from holdfast.tools.chaos.library import find, ready
from holdfast.tools.chaos.real.targets import part_of
from holdfast.tools.chaos.runs import ScenarioRuns
from holdfast.tools.chaos.scenarios.catalogue import CATALOGUE
from holdfast.tools.chaos.scenarios.scenario import Scenario, ScenarioError, parse
from holdfast.tools.chaos.scenarios.strikes import draw
from holdfast.tools.cli import main

WANTED = {
    "kill-a-rank",
    "kill-two-at-once",
    "kill-during-recovery",
    "stop-an-agent",
    "preempt-a-node",
    "lose-a-machine",
    "flapping-node",
    "poisson",
    "join-and-leave",
    "plain-torchrun-dcp",
}


def test_every_ready_scenario_can_be_drawn_and_says_what_it_shows() -> None:
    assert ready().keys() >= WANTED
    for name in ready():
        scenario, _ = find(name)
        assert scenario.name == name and len(scenario.about.split()) > 8
        strikes = draw(scenario)
        assert strikes
        if all("real" in CATALOGUE[strike.kind].worlds for strike in strikes):
            has = bool(scenario.workload.nodes)
            assert all(part_of(strike, nodes=has) for strike in strikes)


def test_the_scenario_of_the_guide_is_one() -> None:
    guide = (ROOT / "docs" / "how-to" / "chaos.md").read_text()
    found = re.findall(r"^```toml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    scenarios = [tomllib.loads(text) for text in found if text.startswith("name = ")]
    assert scenarios
    for document in scenarios:
        assert draw(parse(document, source="docs/how-to/chaos.md"))


def test_every_kind_of_a_real_world_has_an_injector() -> None:
    assert INJECTORS.keys() == {kind for kind, info in CATALOGUE.items() if "real" in info.worlds}
    found = for_kinds(["kill", "stop", "kill"])
    assert found["kill"] is found["stop"]


def test_a_name_that_is_no_scenario_is_told_with_those_that_are() -> None:
    with pytest.raises(ScenarioError, match="choose from kill-a-rank"):
        find("kill-a-rnak")


def test_the_dry_run_prints_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "run", "kill-during-recovery", "--seed", "4", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "kill-during-recovery, seed 4: 2 strikes" in shown
    assert "step 15 complete" in shown and "'fencing' after the fault before" in shown
    assert main(["chaos", "run", "poisson", "--dry-run", "--only", "2,0", "--json"]) == 0
    assert [each["number"] for each in json.loads(capsys.readouterr().out)] == [0, 2]


def test_lists_name_scenarios_and_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "list", "--json"]) == 0
    assert {each["name"] for each in json.loads(capsys.readouterr().out)} >= WANTED
    assert main(["chaos", "list"]) == 0 == main(["chaos", "faults"])
    shown = capsys.readouterr().out
    assert "kill-a-rank" in shown and "preempt" in shown and "grace in seconds (10)" in shown


def test_a_scenario_that_cannot_be_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lost.toml"
    file.write_text('name = "lost"\nabout = ""\nworkload.command = ["true"]\n')
    with file.open("a") as more:
        more.write('[[fault]]\nkind = "lose"\nwhen.step = 1\n')
    assert main(["chaos", "run", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "a job without workload.nodes has only workers" in capsys.readouterr().err


class Imagined(ScenarioRuns):
    """Runs that break when strikes 2 and 5 come together."""

    def _in_world(self, seed: int, only: Collection[int] | None, folder: Path) -> Result:
        strikes = draw(self._scenario, seed=seed, only=only)
        (folder / "strikes.json").write_text("[]")
        numbers = {strike.number for strike in strikes}
        broken = (Violation(check="samples once", message=""),) if {2, 5} <= numbers else ()
        return Result(
            name="imagined",
            world="real",
            seed=seed,
            only=None if only is None else tuple(sorted(only)),
            held=not broken,
            seconds=0.0,
            verdict=HistoryVerdict(
                attempts=1,
                steps=1,
                executed=1,
                undone=0,
                undone_most=0,
                samples=0,
                checked=(),
                violations=broken,
            ),
            struck=tuple(
                Struck(number=strike.number, kind=strike.kind, victim="", t=0.0)
                for strike in strikes
            ),
            problems=() if broken else ("the job failed: for another reason",),
            replay="",
        )


def imagined(tmp_path: Path) -> Imagined:
    fault = {"kind": "kill", "when": {"every_s": 1.0, "times": 8}}
    document = {
        "name": "imagined",
        "about": "",
        "workload": {"command": ["true"]},
        "fault": [fault],
    }
    scenario: Scenario = parse(document, source="test")
    file = tmp_path / "imagined.toml"
    file.write_text("")
    return Imagined(scenario, file, name=str(file), world="real", tell=lambda text: None)


def test_a_broken_run_is_made_small_and_another_failure_is_not_taken_for_it(tmp_path: Path) -> None:
    runs, out = imagined(tmp_path), tmp_path / "out"
    broken = runs.run(seed=5, only=None, folder=out)
    assert runs.shrink(broken, folder=out) == (2, 5)
    assert sorted(path.name for path in out.iterdir()) == [
        "result.json",
        "scenario.toml",
        "smallest",
        "strikes.json",
    ]
    assert runs.replay(5, (5, 2)).endswith("imagined.toml --seed 5 --only 2,5")


def test_a_folder_with_something_else_is_not_emptied(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="the folder contains other files"):
        imagined(tmp_path).run(seed=1, only=None, folder=out)
    assert (out / "thesis.tex").exists()


def test_of_what_fails_together_none_can_be_left_out() -> None:
    requests: list[tuple[str, ...]] = []

    def fails(letters: object) -> bool:
        assert isinstance(letters, tuple)
        requests.append(letters)
        return {"b", "g"} <= set(letters)

    assert fewest("abcdefgh", fails=fails) == ("b", "g")
    assert fewest("ab", fails=lambda letters: True) == ()
    limited = FailureOracle(fails, 3)
    before = len(requests)
    fewest("abcdefgh", fails=limited)
    assert len(requests) == before + 3


@pytest.mark.parametrize(
    ("nodes", "more", "wrong"),
    [
        (["node0", "node1"], {}, "2 machines have no managed etcd; give three or more"),
        (["a", "b", "c"], {}, "name them node0, node1, node2"),
        (["node0", "node1", "node2"], {"spares": 1}, "spares, domains and apart are not for"),
        (["node0", "node1", "node2"], {"return_s": 5.0}, "return_s is for the embedded"),
    ],
)
def test_machines_of_a_managed_etcd_are_three_with_numbers(
    nodes: list[str], more: dict[str, object], wrong: str
) -> None:
    workload = {
        "command": ["true"],
        "coordinator": "managed",
        "nodes": {node: {"trainer": 1} for node in nodes},
        **more,
    }
    with pytest.raises(ScenarioError, match=wrong):
        parse({"name": "managed", "about": "", "workload": workload}, source="test")
