"""The control section: simulated planes come to rest, and messages grow with the nodes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from holdfast.tools.bench.control import control, show
from holdfast.tools.bench.samples import BenchSetup


def test_messages_of_a_change_grow_with_the_nodes_and_no_faster(tmp_path: Path) -> None:
    laps: list[int] = []
    setup = BenchSetup(
        size_bytes=0, repeat=2, directory=tmp_path, lap=lambda: laps.append(1), quick=True
    )
    found = {figure.name: figure for figure in control(setup, worlds=(8, 32, 64, 192))}
    assert len(laps) == setup.repeat + 1
    few, many = (found[f"{nodes} nodes: messages per node"].value for nodes in (8, 32))
    assert 0 < many < 1.5 * few
    assert found["32 nodes: generations"].value >= 4
    assert found["32 nodes: decision"].ratio is not None
    events = {n: found[f"{n} nodes: events per node"].value for n in (8, 32, 64, 192)}
    assert events[64] < events[32], "few decide"
    assert events[192] < 1.1 * events[64]
    assert found["192 nodes: events per node, all watching"].value > 20 * events[192]
    console = Console(width=160, record=True, file=(tmp_path / "out").open("w"))
    show(list(found.values()), console=console)
    assert "32 nodes" in console.export_text()
