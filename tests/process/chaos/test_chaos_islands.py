"""Scenarios of islands hold: struck islands end as the undisturbed ones, or as the logbook says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from session_imports import PRELOAD

from holdfast.elastic.preload.program import PRELOAD_ENV
from holdfast.tools.chaos.library import FOLDER
from holdfast.tools.cli import main

SEA = {
    "one logbook",
    "own work once",
    "equal weights after every tide",
    "equal weights at the end",
    "replay of the logbook",
}


@pytest.fixture(autouse=True)
def importing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a node import torch once, not in each of its processes."""
    monkeypatch.setenv(PRELOAD_ENV, ",".join(PRELOAD))


def ran(scenario: str, folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    status = main(["chaos", "run", scenario, "--out", str(folder), "--json", *more])
    said = capsys.readouterr()
    assert said.out, said.err
    found = json.loads(said.out)
    assert status == 0, found
    for result in found if isinstance(found, list) else [found]:
        assert result["held"] and set(result["verdict"]["checked"]) >= SEA, result
        assert not all(each["missed"] for each in result["struck"]), result["struck"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_island_whose_worker_is_killed_goes_on_in_a_sea_that_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = (FOLDER / "sea-worker-killed.toml").read_text()
    path = tmp_path / "alone.toml"
    path.write_text(scenario.replace("[[fault]]", "[checks]\nundisturbed = false\n\n[[fault]]"))
    found = ran(str(path), tmp_path / "out", capsys)
    assert found["verdict"]["attempts"] > 2
    assert found["struck"][0]["victim"].endswith(": trainer/0")
    report = tmp_path / "report.html"
    assert main(["chaos", "report", str(tmp_path / "out"), "--out", str(report)]) == 0
    assert "own work once" in report.read_text()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["sea-worker-killed", "sea-cut-off", "sea-slow-island"])
def test_a_sea_that_waits_for_all_ends_as_undisturbed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ran(name, tmp_path / "out", capsys)
    assert "sea of the reference" in found["verdict"]["checked"]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["sea-island-lost", "sea-join-and-leave"])
def test_islands_come_and_go_and_the_logbook_says_what_became_of_the_sea(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(name, tmp_path / "out", capsys)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_islands_of_two_ranks_that_are_killed_whole_again_and_again_end_as_undisturbed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ran("sea-islands-killed", tmp_path / "out", capsys, "--repeat", "5")
    ends = {result["verdict"]["steps"] for result in results}
    assert ends == {3 * 40}
