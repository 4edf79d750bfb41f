"""Islands that train one data set together: each sample once, whoever is killed or leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from island_jobs import Sea, sea

from holdfast.tools import cli

FOUNDERS = ("--founders", 2)
EPOCHS = 4


def _flags(folder: Path, name: str) -> tuple[object, ...]:
    return (*FOUNDERS, "--epochs", EPOCHS, "--history", folder / f"history-{name}")


def _judged(waters: Sea, capsys: pytest.CaptureFixture[str], *names: str) -> dict[str, Any]:
    """Return the checker's verdict on the records and the islands' histories."""
    for name in names:
        history = str(waters.folder / f"history-{name}")
        of_sea = ["--of-sea", str(waters.meet), "--island", name]
        assert cli.main(["chaos", "check", history, *of_sea]) == 0
    capsys.readouterr()
    code = cli.main(["islands", "samples", "--sea", str(waters.meet), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (code, found["wrong"], found["is_over"]) == (0, [], True)
    assert [epoch["merged"] for epoch in found["epochs"]] == [64] * EPOCHS
    return found


def test_every_sample_is_trained_once_though_one_island_is_killed_and_one_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sea(tmp_path) as waters:
        stored = ("--checkpoint", tmp_path / "stored", "--checkpoint-every", 5)
        waters.start("oslo", *_flags(tmp_path, "oslo"), "--stop", 7)
        waters.start("lima", *_flags(tmp_path, "lima"), *stored, "--gate", 9, tmp_path / "never")
        waters.until((tmp_path / "stored" / "step-000000000005" / "manifest.json").exists)
        waters.until(lambda: len(waters.records("merged")) >= 2)
        waters.kill("lima")
        # what is given back once the other has trained its last sample is missing, as documented
        gate = tmp_path / "gate"
        again = (*stored, "--attempt", 1000, "--gate", 14, gate)
        waters.start("lima", *_flags(tmp_path, "lima"), *again)
        waters.until(lambda: bool(waters.records("left")))
        gate.touch()
        waters.finish("oslo", "lima")
        assert {each["why"] for each in waters.records("left")} == {"done"}
        found = _judged(waters, capsys, "lima", "oslo")
        by_island = {each["island"]: each["merged"] for each in found["lineages"]}
        assert by_island == {"oslo": 8 * 8, "lima": 64 * EPOCHS - 8 * 8}


@pytest.mark.exhaustive  # the simulated seas put islands out, too
def test_the_samples_of_an_island_that_does_not_come_back_are_trained_by_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sea(tmp_path) as waters:
        patient = ("--patience", 20)
        waters.start("oslo", *_flags(tmp_path, "oslo"), *patient)
        gated = ("--gate", 9, tmp_path / "never")
        waters.start("lima", *_flags(tmp_path, "lima"), *patient, *gated)
        waters.until(lambda: len(waters.records("merged")) >= 2)
        waters.kill("lima")
        waters.finish("oslo")
        assert [each["why"] for each in waters.records("left")] == ["silent", "done"]
        _judged(waters, capsys, "oslo", "lima")


def test_what_the_logbook_cannot_deal_is_refused_by_name(tmp_path: Path) -> None:
    with sea(tmp_path) as waters:
        waters.start("oslo", "--founders", 1, "--steps", 4, "--undealt")
        status, said = waters.exit("oslo")
        assert status
        assert "make loader = run.loader(dataset) before the steps" in said
