"""The losses of islands beside DDP and one alone, from the outcomes of several seeds."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from holdfast.tools.bench.islands.learning import ALONE, DDP, ISLANDS, figures_of, show
from holdfast.tools.bench.islands.outcome import LineBytes, Outcome, Window


def outcome(*curve: float) -> Outcome:
    return Outcome(
        window=Window(steps=39, began_s=0.0, ended_s=1.0, line=None),
        parameters=100,
        held_out=curve[-1],
        content=LineBytes(500, 500),
        curve=curve,
    )


def test_a_loss_is_the_mean_of_all_seeds_between_the_least_and_the_most() -> None:
    found = figures_of({ISLANDS: [outcome(4, 3, 2, 1), outcome(4, 3, 2, 2)]}, steps=40)
    last = next(figure for figure in found if figure.name == "4 islands: the end")
    assert (last.value, last.low, last.high, last.samples) == (1.5, 1, 2, (1, 2))
    assert [figure.name.partition(": ")[2] for figure in found] == [
        *("10", "20", "30", "the end", "sent"),
    ]
    assert found[-1].value == pytest.approx(5.0)


def test_every_way_has_a_line_and_one_alone_sends_nothing() -> None:
    figures = figures_of({way: [outcome(4, 3, 2, 1)] for way in (DDP, ALONE)}, steps=40)
    assert "one island alone: sent" not in {figure.name for figure in figures}
    console = Console(file=StringIO(), width=140)
    show(figures, console=console)
    assert isinstance(console.file, StringIO)
    said = console.file.getvalue()
    assert "step 10" in said and "1.000 (1.000–1.000)" in said
