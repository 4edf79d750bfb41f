"""The comparison of windows with readers and without, from steps that a test tells."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from holdfast.ckpt.errors import PeerError
from holdfast.elastic.events import StepDone
from holdfast.tools.bench import surface

WINDOWS = [(False, 0.0, 10.0), (True, 10.0, 20.0), (False, 20.0, 30.0)]


def steps(*seconds: float) -> list[StepDone]:
    """Return two steps in each window; another rank's do not count."""
    found = []
    for at, each in enumerate(seconds):
        for rank, value in ((0, each), (0, each), (1, 99.0)):
            found.append(StepDone(step=1, rank=rank, seconds=value, time_s=10.0 * at + 5))
    return found


def test_a_window_with_readers_is_compared_with_its_neighbours() -> None:
    found = {figure.name: figure for figure in surface._compared(WINDOWS, steps(1.0, 1.515, 2.0))}
    assert found[surface.ALL].ratio == pytest.approx(1.01)
    assert found[surface.ALL].value == 1.515
    assert found["a step without readers"].value == 1.5


def test_a_window_without_steps_is_refused() -> None:
    with pytest.raises(PeerError, match="no step ended in a window"):
        list(surface._compared(WINDOWS, steps(1.0, 1.0)))


def test_the_figures_are_shown() -> None:
    figures = [
        *surface._compared(WINDOWS, steps(1.0, 1.0, 1.0)),
        *surface._costs({"metrics": 0.1}, 20.0),
    ]
    console = Console(file=io.StringIO(), width=120)
    surface.show(figures, console=console)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "1.0000" in said
    assert "0.50 % of a core" in said
