"""Every set of nodes is lost once: losses covered by parity are survived, and reported as such."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.tools.chaos.survival import simulated
from holdfast.tools.chaos.survival.sets import names, sets
from holdfast.tools.chaos.survival.simulated import lose
from holdfast.tools.cli import main


@pytest.mark.parametrize(("nodes", "parity"), [(3, 1), (4, 2)])
def test_what_parity_covers_is_survived_and_more_goes_back(
    nodes: int, parity: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["chaos", "survive", "--nodes", str(nodes), "--parity", str(parity)]
    assert main([*words, "--json", str(tmp_path / "matrix.json")]) == 0
    shown = capsys.readouterr().out
    assert f"{parity} {'node' if parity == 1 else 'nodes'} lost, covered by parity" in shown
    matrix = json.loads((tmp_path / "matrix.json").read_text())
    assert len(matrix["sets"]) == 2**nodes - 1
    for each in matrix["sets"]:
        if len(each["nodes"]) <= parity:
            assert each["outcome"] == "parity", each
    assert matrix["sets"][-1]["outcome"] == "checkpoint", "with all nodes all memory is gone"
    assert matrix["broken"] == []


def test_no_two_nodes_of_a_group_are_covered_by_one_fragment() -> None:
    """Blocks of less than a piece would be: all but their first pieces are zeros."""
    pairs = [nodes for nodes in sets(4) if len(nodes) == 2]
    assert {lose(nodes, of=4, parity=1, seed=0) for nodes in pairs} == {("checkpoint", "")}


def test_sets_are_tried_once_each_small_ones_first() -> None:
    assert [names(each) for each in sets(2)] == [("n0",), ("n1",), ("n0", "n1")]


def test_a_job_that_goes_back_where_parity_covers_the_loss_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    none = {"nothing": -1, "rebuilt": 0, "memory": 0}
    monkeypatch.setattr(simulated, "_undisturbed", lambda of, parity, seed: none)
    outcome, why = lose((0,), of=2, parity=1, seed=0)
    assert outcome == "checkpoint"
    assert "though parity covers 1" in why
    assert main(["chaos", "survive", "--nodes", "2", "--parity", "1"]) == 1
    assert "✕ n0" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("--nodes", "13"), ("--nodes", "2", "--parity", "2")])
def test_what_cannot_be_tried_is_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    parity = () if "--parity" in words else ("--parity", "1")
    assert main(["chaos", "survive", *words, *parity]) == 2
    assert "fewer" in capsys.readouterr().err
