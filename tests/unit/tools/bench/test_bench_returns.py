"""The figures of killed islands beside those of killed plain runs."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from holdfast.tools.bench.faults import pauses
from holdfast.tools.bench.faults.recoveries import MeasuredRecovery
from holdfast.tools.bench.islands.returns import ISLAND, KILLED, LOST, RUN, _Round, figures_of, show


def recovery(pause_s: float) -> MeasuredRecovery:
    return MeasuredRecovery(
        began_s=0.0,
        ends_s={"reformed": 0.1, "restored": 0.2, "begun": pause_s},
        step_s=12.0,
        new_s=13.0,
        generation=2,
        world=2,
        lost_steps=1,
    )


def rounds(*pauses_s: float) -> list[_Round]:
    return [
        _Round(killed=recovery(each), lost=recovery(10 * each), step_s=0.25) for each in pauses_s
    ]


def test_each_fault_of_an_island_is_told_as_a_multiple_of_the_plain_run_s() -> None:
    figures = figures_of({RUN: rounds(0.5, 0.3, 0.4), ISLAND: rounds(0.6, 0.8, 0.7)})
    found = {figure.name: figure for figure in figures}
    for fault, times in ((KILLED, 1), (LOST, 10)):
        plain = found[f"{RUN}, {fault}: {pauses.PAUSE}"]
        own = found[f"{ISLAND}, {fault}: {pauses.PAUSE}"]
        assert (plain.value, plain.ratio) == (0.4 * times, None)
        assert (round(own.ratio or 0, 2), own.versus) == (1.75, plain.name)
    console = Console(file=StringIO(), width=150)
    show(figures, console=console)
    assert isinstance(console.file, StringIO)
    assert f"{ISLAND}, {LOST}" in console.file.getvalue()
