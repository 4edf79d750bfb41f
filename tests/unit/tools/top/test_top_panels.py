"""The panels of a run as texts and rows, and the lines where no terminal shows them."""

from __future__ import annotations

import msgspec
from node_answers import ANSWERING
from synthetic_run import BEGIN, hurt_job

from holdfast.elastic.events import Event, JobEnded, JobStarted, NodeExited, WorkerStarted
from holdfast.tools.live.fold import Fold
from holdfast.tools.live.view import RunView
from holdfast.tools.top import panels
from holdfast.tools.top.plain import RunLines
from holdfast.tools.top.wording import headline, protection, span


def view_of(*events: Event, now_s: float = BEGIN + 40, answers: bool = False) -> RunView:
    fold = Fold()
    fold.apply(events)
    return fold.view(now_s=now_s, statuses={"n0": ANSWERING} if answers else None)


def running() -> list[Event]:
    return [event for event in hurt_job() if not isinstance(event, JobEnded)]


def cells(row: panels.Row) -> list[str]:
    return [cell.plain for cell in row.cells]


def test_the_title_tells_state_generation_and_step() -> None:
    assert (
        " TRAINING   generation 5   2 trainers   step 18 "
        in panels.title(view_of(*running())).plain
    )


def test_a_recovery_is_a_row_with_its_phases_and_its_reason_behind() -> None:
    rows = panels.recoveries(view_of(*hurt_job()))
    row = next(row for row in rows if row.key == "2")
    found = dict(zip(panels.RECOVERY_COLUMNS, cells(row), strict=True))
    assert (found["cause"], found["victim"], found["detect"]) == ("loss", "trainer/1", "10 ms")
    assert "trainer/1 exited; going on smaller" in row.whole
    assert "0 steps are repeated" in row.whole
    narrow = panels.recoveries(view_of(*hurt_job()), narrow=True)
    assert len(narrow[0].cells) == len(panels.RECOVERY_COLUMNS_NARROW)


def test_nodes_in_trouble_come_first() -> None:
    story = [JobStarted(nodes=tuple(f"n{i}" for i in range(5)), time_s=BEGIN)]
    started = [
        WorkerStarted(seat=f"trainer/{i}", node=f"n{i}", pid=i + 1, time_s=BEGIN + 1)
        for i in range(5)
    ]
    lost = NodeExited(victim="n3", status="killed by SIGKILL", memory_kept=True, time_s=BEGIN + 2)
    rows = panels.nodes(view_of(*story, *started, lost))
    assert rows[0].key == "n3"
    assert cells(rows[0])[1] == "lost"
    assert "trainer/3" in rows[0].whole


def test_the_answer_of_a_sidecar_is_in_its_row_and_in_the_panels() -> None:
    view = view_of(*running(), answers=True)
    row = next(row for row in panels.nodes(view) if row.key == "n0")
    assert dict(zip(panels.NODE_COLUMNS, cells(row), strict=True))["protected"] == "40"
    assert "step 40" in panels.protection(view).plain
    assert "parity     1.0 MiB" in panels.memory(view).plain


def test_goodput_and_the_use_of_time_are_shown() -> None:
    text = panels.time_use(view_of(*hurt_job())).plain
    assert "goodput" in text
    assert "productive" in text


def test_rows_are_bounded() -> None:
    story = [
        WorkerStarted(seat=f"trainer/{i}", node=f"n{i:04}", pid=i + 1, time_s=BEGIN)
        for i in range(1000)
    ]
    assert len(panels.nodes(view_of(*story))) == panels.MOST_ROWS


def test_text_of_others_cannot_steer_the_terminal() -> None:
    evil = "\x1b]0;gone\x07[red]"
    view = view_of(*running(), NodeExited(victim=evil, status=evil, memory_kept=True, time_s=BEGIN))
    plain = RunLines(every_s=1)
    shown = [*(cell for row in panels.messages(view) for cell in cells(row)), *plain.lines(view)]
    shown += [row.whole for row in (*panels.messages(view), *panels.nodes(view))]
    assert any("[red]" in text for text in shown), "markup is text"
    assert not any("\x1b" in text or "\x07" in text for text in shown)


def test_durations_are_in_the_unit_that_fits() -> None:
    texts = [span(seconds) for seconds in (None, 0.012, 3.44, 130, 7200)]
    assert texts == ["–", "12 ms", "3.4 s", "2 min", "2.0 h"]


def test_lines_tell_each_message_once_and_the_state_from_time_to_time() -> None:
    lines = RunLines(every_s=10)
    view = view_of(*running())
    first = list(lines.lines(view))
    state = [line.split(" ", 1)[1] for line in first[len(view.messages) :]]
    assert state[:2] == [headline(view), protection(view)]
    assert list(lines.lines(msgspec.structs.replace(view, now_s=view.now_s + 5))) == []
    later = list(lines.lines(msgspec.structs.replace(view, now_s=view.now_s + 11)))
    assert [line.split(" ", 1)[1] for line in later] == state
    ended = list(lines.lines(view_of(*hurt_job())))
    assert any("the job is over" in line for line in ended)
    assert any(" done: step 18" in line for line in ended)
