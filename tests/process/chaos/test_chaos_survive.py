"""Losses of nodes in real processes: the outcome of each set agrees with the prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from session_imports import PRELOAD

from holdfast.elastic.preload.program import PRELOAD_ENV
from holdfast.tools.cli import main


def survived(
    folder: Path, *words: str, capsys: pytest.CaptureFixture[str]
) -> tuple[list[dict[str, Any]], str]:
    """Return the lost sets from the JSON, and the output."""
    matrix = folder.with_suffix(".json")
    words = ("chaos", "survive", "--world", "real", *words, "--out", str(folder))
    status = main([*words, "--json", str(matrix)])
    shown = capsys.readouterr()
    assert status == 0, (shown.out, shown.err)
    report = json.loads(matrix.read_text())
    assert report["broken"] == []
    found: list[dict[str, Any]] = report["sets"]
    return found, shown.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_set_of_nodes_is_lost_as_predicted_and_not_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PRELOAD_ENV, ",".join(PRELOAD))
    words = ("--nodes", "2", "--parity", "1", "--most", "1")
    found, said = survived(tmp_path / "out", *words, capsys=capsys)
    (loss,) = found
    assert loss["outcome"] == loss["predicted"]
    assert "the job without faults" in said and "lose: node" in said
    again, said = survived(tmp_path / "out", *words, capsys=capsys)
    assert again == found
    assert said == "", "no job was run"


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("nodes", "parity"), [(3, 1), (4, 1), (4, 2)])
def test_every_set_of_nodes_is_lost_as_predicted(
    nodes: int, parity: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--nodes", str(nodes), "--parity", str(parity))
    found, _ = survived(tmp_path / "out", *words, capsys=capsys)
    assert len(found) == 2**nodes - 1
    assert [each for each in found if each["outcome"] != each["predicted"]] == []
