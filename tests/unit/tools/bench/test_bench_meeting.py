"""The meeting section: ranks form both ways, and larger worlds are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from holdfast.tools.bench.crowd import meeting
from holdfast.tools.bench.samples import BenchSetup


def test_few_ranks_meet_both_ways_and_many_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "LARGE_NODES", (10, 1_000))
    laps: list[int] = []
    setup = BenchSetup(size_bytes=0, repeat=1, directory=tmp_path, lap=lambda: laps.append(1))
    found = {figure.name: figure.value for figure in meeting.meeting(setup, worlds=(4,))}
    assert len(laps) == setup.repeat + 1
    for how in ("mesh", "tree"):
        assert found[f"4 ranks, {how}: connections, used"] >= 2
        assert found[f"4 ranks, {how}: requests"] > 0
        assert found[f"4 ranks, {how}: form"] > 0
    assert found["8,000 ranks, mesh, computed: connections, used"] == 7_999
    assert found["8,000 ranks, tree, computed: connections, used"] < 14
    assert found["8,000 ranks, tree, computed: most connections"] < 3 * 32
    assert found["8,000 ranks, tree, computed: hops"] < 20
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    meeting.show(meeting.meeting(setup, worlds=()), console=console)
    assert "8,000 ranks, tree, computed" in console.export_text()
