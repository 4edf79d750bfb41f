"""The application in a terminal of its own: keys, sizes, a run that goes on, one that is over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic_run import BEGIN, hurt_job
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from holdfast.elastic.events import Event, JobEnded, JobStarted, StepDone
from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.tools import cli
from holdfast.tools.live.fold import Fold
from holdfast.tools.live.view import RunView
from holdfast.tools.top import command
from holdfast.tools.top.app import Details, TopApp


class Told:
    """A run whose events the test gives; it counts how often the nodes were asked."""

    def __init__(self, *events: Event) -> None:
        self._fold, self._new, self._lock = Fold(), list(events), threading.Lock()
        self.asked = 0

    def give(self, *events: Event) -> None:
        with self._lock:
            self._new += events

    def read(self) -> int:
        with self._lock:
            new, self._new = self._new, []
        self._fold.apply(new)
        return len(new)

    def ask(self) -> None:
        self.asked += 1

    def view(self) -> RunView:
        return self._fold.view(now_s=BEGIN + 40)


def app_of(source: Told) -> TopApp:
    return TopApp(source, every_s=0.1, asks_s=0.1)  # keys wait for what a look redraws


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await pilot.pause(0.02)
    raise AssertionError("the picture did not change in time")


def title(app: TopApp) -> str:
    return str(app.screen_stack[0].query_one("#title", Static).render())


def rows(app: TopApp, which: str) -> int:
    return int(app.screen_stack[0].query_one(f"#{which}", DataTable).row_count)


async def test_a_run_that_goes_on_is_shown_as_it_goes() -> None:
    source = Told(JobStarted(run="r-1", nodes=("n0",), time_s=BEGIN))
    app = app_of(source)
    async with app.run_test(size=(140, 45)) as pilot:
        await until(pilot, lambda: "r-1   STARTING" in title(app))
        step = StepDone(step=7, generation=1, seat="trainer/0", node="n0", time_s=BEGIN + 39)
        source.give(step)
        await until(pilot, lambda: "step 7" in title(app))
        assert rows(app, "nodes") == 1
        await until(pilot, lambda: source.asked > 1)


async def test_enter_shows_the_whole_of_a_row_and_escape_closes_it() -> None:
    app = app_of(Told(*hurt_job()))
    async with app.run_test(size=(140, 45)) as pilot:
        await until(pilot, lambda: rows(app, "recoveries") == 5)
        await pilot.press("r", "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, Details))
        shown = str(app.screen.query_one("#details Static", Static).render())
        assert "node a is gone; parity has it" in shown
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, Details))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Details))
        await pilot.press("q")
        await until(pilot, lambda: not isinstance(app.screen, Details))
        assert app.is_running, "q closes the details first"


async def test_keys_go_to_the_tables_and_q_ends_the_command() -> None:
    app = app_of(Told(*hurt_job()))
    async with app.run_test(size=(140, 45)) as pilot:
        for key, which in (("m", "messages"), ("r", "recoveries"), ("n", "nodes")):
            await pilot.press(key)
            assert app.focused is not None
            assert app.focused.id == which
        await pilot.press("q")
    assert not app.is_running


async def test_a_picture_that_is_held_does_not_change() -> None:
    source = Told(JobStarted(run="r-1", time_s=BEGIN))
    app = app_of(source)
    async with app.run_test(size=(140, 45)) as pilot:
        await until(pilot, lambda: "r-1" in title(app))
        await pilot.press("p")
        await until(pilot, lambda: title(app).startswith("PAUSED"))
        source.give(StepDone(step=7, generation=1, node="n0", time_s=BEGIN + 39))
        asked = source.asked
        await until(pilot, lambda: source.asked > asked + 3)
        assert "step 0" in title(app)
        await pilot.press("p")
        await until(pilot, lambda: "step 7" in title(app))


async def test_the_cursor_stays_on_its_row_when_rows_come() -> None:
    source = Told(*[event for event in hurt_job() if not isinstance(event, JobEnded)])
    app = app_of(source)
    async with app.run_test(size=(140, 45)) as pilot:
        await until(pilot, lambda: rows(app, "messages") > 4)
        await pilot.press("m", "down", "down")
        table = app.query_one("#messages", DataTable)
        before = table.get_row_at(table.cursor_row)
        source.give(JobEnded(ok=True, message="all done", time_s=BEGIN + 39))
        await until(pilot, lambda: "all done" in str(table.get_row_at(0)[2]))
        assert table.get_row_at(table.cursor_row) == before


@pytest.mark.parametrize("size", [(200, 60), (120, 36), (80, 24), (40, 12)])
async def test_every_size_shows_the_title_and_the_tables(size: tuple[int, int]) -> None:
    app = app_of(Told(*hurt_job()))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: rows(app, "nodes") > 0)
        narrow = size[0] < 120
        columns = app.query_one("#recoveries", DataTable).columns
        assert len(columns) == (5 if narrow else 10)
        assert app.screen.has_class("-narrow" if narrow else "-wide")
        assert "DONE" in title(app)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The directory of a run that is over."""
    writer = EventWriter(events_file(tmp_path, "n0"), node="n0")
    for event in hurt_job():
        writer.write(event, source="worker")
    writer.close()
    return tmp_path


def test_where_stdout_is_no_terminal_lines_are_printed_until_the_job_ends(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "the job is over" in said
    assert "done: step 18, generation 5" in said


def test_the_state_now_is_a_few_lines(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(run_dir), "--once"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 8


@pytest.mark.parametrize(
    ("term", "textual", "fits"),
    [("xterm", True, True), ("dumb", True, False), ("", True, False), ("xterm", False, False)],
)
def test_a_terminal_that_cannot_show_it_gets_lines(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    term: str,
    textual: bool,
    fits: bool,
) -> None:
    monkeypatch.setenv("TERM", term)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    monkeypatch.setattr(command, "find_spec", lambda name: object() if textual else None)
    assert command._fits_terminal() == fits
    assert ("pip install 'holdfast[top]'" in capsys.readouterr().err) == (not textual)


def test_a_directory_without_a_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", str(tmp_path)]) == 1
    assert "no run has written events here" in capsys.readouterr().err
