"""The plan section of the bench counts the same copies as torch's own planner."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from holdfast.tools.bench.plan import TENSORS, plan, show, transformer
from holdfast.tools.bench.samples import BenchSetup


def test_figures_of_a_small_world_agree_with_the_peer() -> None:
    laps: list[None] = []
    setup = BenchSetup(size_bytes=1, repeat=1, directory=Path(), lap=lambda: laps.append(None))
    figures = {figure.name: figure for figure in plan(setup, worlds=(64,))}
    assert len(laps) == 4
    assert len(figures) == 10
    own = figures["64 ranks, alike: one rank's plan"]
    assert own.versus == "DCP's planner"
    assert own.ratio is not None
    assert figures["64 ranks, alike: copies"].value == 80_000
    assert 0 < figures["64 ranks, all different: peak memory"].value < 100
    shown = io.StringIO()
    show(list(figures.values()), console=Console(file=shown, width=200))
    assert "64 ranks, all different" in shown.getvalue()


def test_the_models_have_as_many_tensors_as_they_say() -> None:
    layers = transformer((8, 8), step=8).tensors
    assert len(layers) == TENSORS
    assert len({p.spec.shape for p in transformer((8, 8), step=0).tensors.values()}) < 10
    assert len({p.spec.shape for p in layers.values()}) > 700
