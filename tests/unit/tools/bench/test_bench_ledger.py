"""The ledger section: every stage of a life has its figures, by prompt and by arrival."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from holdfast.tools.bench.ledger.section import arrival_plan_of, ledger, plan_of, show
from holdfast.tools.bench.samples import BenchSetup


def test_a_ledger_is_measured_open_finished_and_old(tmp_path: Path) -> None:
    laps: list[int] = []
    setup = BenchSetup(size_bytes=0, repeat=1, directory=tmp_path, lap=lambda: laps.append(1))
    plans = (plan_of(400, ages=(1, 3)), arrival_plan_of(320, ages=(2,)))
    found = {figure.name: figure for figure in ledger(setup, plans=plans)}
    assert len(laps) == setup.repeat + 1
    assert "400, open: claims" not in found
    for stage in ("400, finished", "400, after 3 steps", "320 by arrival, after 2 steps"):
        for what in ("claims", "completions", "message", "snapshot", "restore takes"):
            assert found[f"{stage}: {what}"].value > 0
    sizes = [found[f"400, {age}: snapshot"].value for age in ("finished", "after 3 steps")]
    assert sizes[1] < 1.1 * sizes[0], "it does not grow with the steps"
    console = Console(width=160, record=True, file=(tmp_path / "out").open("w"))
    show(list(found.values()), console=console)
    assert "after 3 steps" in console.export_text()
