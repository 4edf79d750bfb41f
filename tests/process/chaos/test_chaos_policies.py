"""Scenarios of policies with runs of their own hold: what is struck ends as undisturbed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from session_imports import PRELOAD

from holdfast.elastic.preload.program import PRELOAD_ENV
from holdfast.tools.cli import main

CHECKED = {
    "no step skipped",
    "samples once",
    "samples of the reference",
    "state of the reference",
    "steps repeat exactly",
    "samples of the lead",
}


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_policies_whose_runs_are_struck_learn_what_they_learn_undisturbed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PRELOAD_ENV, ",".join(PRELOAD))
    status = main(["chaos", "run", "policies-killed", "--out", str(tmp_path / "out"), "--json"])
    said = capsys.readouterr()
    assert said.out, said.err
    found = json.loads(said.out)
    assert status == 0 and found["held"], found
    assert set(found["verdict"]["checked"]) >= CHECKED
    assert found["verdict"]["steps"] == 2 * 20
    assert not any(each["missed"] for each in found["struck"]), found["struck"]
