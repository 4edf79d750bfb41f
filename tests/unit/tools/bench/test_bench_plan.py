"""The plan section of the bench commits, opens and plans a step of many writers."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from holdfast.ckpt.geometry.grid import fault_of_cover
from holdfast.tools.bench.plan import TENSORS, StagedJob, SyntheticStep, plan, show, transformer
from holdfast.tools.bench.samples import BenchSetup

JOB = StagedJob(stages=4, dp=2, tp=2)


def test_figures_of_a_small_job(tmp_path: Path) -> None:
    laps: list[None] = []
    setup = BenchSetup(size_bytes=1, repeat=1, directory=tmp_path, lap=lambda: laps.append(None))
    figures = {figure.name: figure for figure in plan(setup, jobs=(JOB,))}
    assert len(laps) == 2
    opened = figures["16 writers: open and plan one rank"]
    assert opened.versus == "every writer's index"
    assert opened.ratio is not None
    assert 0 < figures["16 writers: of its tensors' entries"].value < 2
    assert figures["16 writers: chunks"].value == sum(SyntheticStep(tmp_path / "x", JOB).chunks)
    assert not (tmp_path / "writers").exists()
    shown = io.StringIO()
    show(list(figures.values()), console=Console(file=shown, width=200))
    assert "16 writers" in shown.getvalue()


def test_all_ranks_together_want_the_whole_model(tmp_path: Path) -> None:
    step = SyntheticStep(tmp_path / "x", JOB)
    wanted = [step.wanted(rank) for rank in range(JOB.world_size)]
    names = [*transformer(2)]
    assert len(names) == TENSORS
    for fqn in (names[0], names[500], names[-1]):
        boxes = {box: None for each in wanted if fqn in each for box in each[fqn][1]}
        assert fault_of_cover(transformer(2)[fqn].spec.shape, [*boxes]) is None
