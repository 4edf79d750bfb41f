"""Ready scenarios hold: struck Holdfast jobs end as the undisturbed ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.tools.cli import main


def ran(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    status = main(["chaos", "run", name, "--out", str(folder), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == 0 and found["held"], found
    checked = set(found["verdict"]["checked"])
    assert {"samples of the reference", "state of the reference"} <= checked
    assert not any(each["missed"] for each in found["struck"]), found["struck"]
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_killed_worker_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ran("kill-a-rank", tmp_path / "out", capsys)
    (struck,) = found["struck"]
    assert struck["victim"].startswith("trainer/")
    assert found["verdict"]["attempts"] > 1
    assert found["replay"] == "holdfast chaos run kill-a-rank --seed 1"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_leaves_after_a_notice_and_a_spare_one_joins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ran("preempt-a-node", tmp_path / "out", capsys)
    assert [each["kind"] for each in found["struck"]] == ["preempt", "join"]
    assert found["verdict"]["undone"] == 0
    lines = (tmp_path / "out" / "history" / "events-spare-0.jsonl").read_text().splitlines()
    assert any(json.loads(line)["kind"] == "worker_started" for line in lines)
