"""The ready scenario of bit flips on the wire: drawn, and refused if there is no wire."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_victims import Site, struck

from holdfast.tools.chaos.faults.injector import MissedError
from holdfast.tools.chaos.faults.network.wire import WireInjector
from holdfast.tools.cli import main


def test_the_dry_run_shows_what_would_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "run", "flipped-wire-bits", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "flip-wire" in shown and "8e+06" in shown and "step 10 complete" in shown


def test_the_simulated_world_has_no_wire(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--world", "simulated", "--out", str(tmp_path / "out")]
    assert main(["chaos", "run", "flipped-wire-bits", *words]) == 2
    said = capsys.readouterr().err
    assert "flip-wire does not exist in the simulated world" in said and "chaos faults" in said


def test_without_another_node_there_is_nothing_to_hit(tmp_path: Path) -> None:
    site = Site(tmp_path)
    victim = site.add("node a", 1, part="node", node="a")
    site.add("sidecar of a", 1, part="sidecar", node="a")
    with pytest.raises(MissedError, match="no sidecar of another node"):
        WireInjector().strike(struck("flip-wire"), victim, site)
