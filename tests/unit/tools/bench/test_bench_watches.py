"""The watches section: agents lose nodes, and all that their watches deliver is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from holdfast.tools.bench.crowd import section
from holdfast.tools.bench.samples import BenchSetup


def test_few_agents_lose_nodes_on_the_embedded_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(section, "MOST_WATCHERS", 4)
    monkeypatch.setattr(section, "KINDS", ("embedded",))
    monkeypatch.setattr(section, "QUIET_S", 0.2)
    laps: list[int] = []
    setup = BenchSetup(
        size_bytes=0, repeat=1, directory=tmp_path, lap=lambda: laps.append(1), quick=True
    )
    found = {figure.name: figure for figure in section.watches(setup, worlds=(8,))}
    assert len(laps) == setup.repeat + 1
    few = found["embedded, 8 nodes: events"].value
    all_watching = found["embedded, 8 nodes, all watching: events"].value
    assert 0 < few < all_watching
    assert found["embedded, 8 nodes: new decider knows"].value > 0
    console = Console(width=160, record=True, file=(tmp_path / "out").open("w"))
    section.show(list(found.values()), console=console)
    assert "8 nodes, all watching" in console.export_text()
