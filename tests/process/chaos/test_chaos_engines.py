"""Servers of answers die, hang, lie, slow down or leave, and no bit of the training changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from session_imports import PRELOAD

from holdfast.elastic.preload.program import PRELOAD_ENV
from holdfast.tools.cli import main

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(900)]

NAMES = ("garbage", "hangs", "killed", "leaves", "out-of-memory", "slow", "stale")


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_of_a_server_changes_no_bit(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PRELOAD_ENV, ",".join(PRELOAD))
    status = main(["chaos", "run", f"engine-{name}", "--out", str(tmp_path / "out"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == 0 and found["held"], found
    checked = set(found["verdict"]["checked"])
    assert {"samples of the reference", "state of the reference"} <= checked
    assert not any(each["missed"] for each in found["struck"]), found["struck"]
