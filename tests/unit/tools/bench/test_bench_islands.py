"""The figures of islands beside DDP, from the outcomes of their processes."""

from __future__ import annotations

import argparse
from io import StringIO

import pytest
from rich.console import Console

from holdfast.tools.bench.command import _limits
from holdfast.tools.bench.islands.outcome import LineBytes, Outcome, Window
from holdfast.tools.bench.islands.section import (
    DDP,
    ISLANDS,
    TORCHFT,
    figures_of,
    show,
    steps_of_ddp,
    trained,
)


def outcome(
    seconds: float, *, sent: int, received: int = 0, line: LineBytes | None = None
) -> Outcome:
    return Outcome(
        window=Window(steps=10, began_s=100.0, ended_s=100.0 + seconds, line=line),
        parameters=1000,
        held_out=2.5,
        content=LineBytes(sent, received),
        waited_s=seconds / 4,
    )


def test_the_slowest_process_decides_and_bytes_are_the_mean() -> None:
    found = trained([outcome(2.0, sent=30_000, received=10_000), outcome(4.0, sent=50_000)])
    assert found.tokens_per_s == 2 * 10 * 8 * 64 / 4.0
    assert (found.sent, found.received, found.waits) == (4.0, 0.5, 0.25)
    assert found.line_sent is None


def test_bytes_of_the_line_are_told_beside_those_of_payloads() -> None:
    found = trained([outcome(2.0, sent=10_000, line=LineBytes(20_000, 40_000))])
    assert (found.sent, found.line_sent, found.line_received) == (1.0, 2.0, 4.0)
    assert found.fewer(trained([outcome(2.0, sent=0, line=LineBytes(80_000, 0))])) == 4.0


@pytest.mark.parametrize(
    ("mbit", "steps"),
    [(0.0, 240), (100.0, 240), (5.0, 37), (1.0, 7), (0.01, 4)],
)
def test_ddp_trains_as_many_steps_as_its_bytes_pass_in_a_minute(mbit: float, steps: int) -> None:
    assert steps_of_ddp(240, mbit=mbit, parameters=250_000) == steps


def test_a_way_that_sent_nothing_yet_is_not_compared() -> None:
    ways = {DDP: trained([outcome(1.0, sent=40)]), TORCHFT: trained([outcome(1.0, sent=0)])}
    names = {figure.name for figure in figures_of("lines", "1 Mbit/s", ways)}
    assert "1 Mbit/s, torchft: tokens" in names
    assert "1 Mbit/s, torchft: fewer" not in names


@pytest.mark.parametrize("text", ["", "a", "-1", "0.01", "1e9"])
def test_limits_that_no_line_has_are_refused(text: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--lines", type=_limits)
    with pytest.raises(argparse.ArgumentError, match="give limits of"):
        parser.parse_args([f"--lines={text}"])
    assert parser.parse_args(["--lines=0,5,1"]).lines == (0, 5, 1)


def test_islands_stand_beside_ddp_on_the_same_line() -> None:
    ways = {
        DDP: trained([outcome(10.0, sent=40_000)]),
        ISLANDS: trained([outcome(2.0, sent=100)]),
    }
    figures = figures_of("lines", "5 Mbit/s", ways)
    values = {figure.name: figure.value for figure in figures}
    assert values["5 Mbit/s, islands: times"] == 5.0
    assert values["5 Mbit/s, islands: fewer"] == 400.0
    assert values["5 Mbit/s, DDP: fewer"] == 1.0
    console = Console(file=StringIO(), width=140)
    show(figures, console=console)
    assert isinstance(console.file, StringIO)
    assert "5 Mbit/s, islands" in console.file.getvalue()
