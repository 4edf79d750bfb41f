"""Long work says how far it is, how fast, and how long it will take; an interrupt says more."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.elastic.events import WorkProgressed, of_kind
from holdfast.elastic.events.log import EventReader
from holdfast.tools.long_work import LongWork, line_of

MIB = 1 << 20


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_lines_come_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with LongWork("Nothing was changed.", every_s=10.0, clock=clock) as work:
        task = work.add_task("reading", total=100 * MIB)
        for _ in range(25):
            clock.now_s += 1.0
            work.advance(task, MIB)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "reading: 10.0 MiB of 100.0 MiB (10 %), 1.0 MiB/s, 1:30 left",
        "reading: 20.0 MiB of 100.0 MiB (20 %), 1.0 MiB/s, 1:20 left",
    ]


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with LongWork("Nothing was changed.") as work:
        work.advance(work.add_task("reading", total=MIB), MIB)
    assert capsys.readouterr().err == ""


def test_an_interrupt_says_how_far_it_came_and_what_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with pytest.raises(KeyboardInterrupt), LongWork("The source is kept.", clock=clock) as work:
        work.advance(work.add_task("writing", total=4 * MIB), MIB)
        raise KeyboardInterrupt
    expected = "stopped at writing: 1.0 MiB of 4.0 MiB (25 %). The source is kept.\n"
    assert capsys.readouterr().err == expected


def test_another_error_says_nothing_of_that(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="x"), LongWork("The source is kept.") as work:
        work.add_task("writing", total=4)
        raise ValueError("x")
    assert capsys.readouterr().err == ""


def test_work_of_unknown_size_has_no_share() -> None:
    work = LongWork("")
    work.add_task("reading", total=None)
    assert line_of(work.tasks[0]) == "reading: 0 B"


def test_events_tell_the_same_to_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_EVENTS", str(tmp_path / "events-tool.jsonl"))
    clock = Clock()
    with pytest.raises(KeyboardInterrupt), LongWork("", every_s=10.0, clock=clock) as work:
        task = work.add_task("reading", total=100 * MIB)
        for _ in range(12):
            clock.now_s += 1.0
            work.advance(task, MIB)
        raise KeyboardInterrupt
    first, last = of_kind(EventReader(tmp_path).new(), WorkProgressed)
    assert (first.work, first.bytes, first.total_bytes) == ("reading", 10 * MIB, 100 * MIB)
    assert (first.bytes_per_s, first.left_s, first.ended) == (MIB, 90.0, "")
    assert (last.bytes, last.ended) == (12 * MIB, "interrupted")
