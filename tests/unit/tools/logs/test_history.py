"""The history of a run directory: merged, followed through bounds, whole where lines are torn."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.elastic.events import JobEnded, JobStarted, StepDone, UserEvent, WorkerStarted, encode
from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.elastic.processes.log_files import bound
from holdfast.elastic.processes.output import stamp
from holdfast.tools.logs.entries import DAMAGED, OUTPUT
from holdfast.tools.logs.history import RunHistory
from holdfast.tools.logs.printed import PrintedLines, split_time


def test_events_and_output_are_one_history(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    launcher = EventWriter(events_file(tmp_path, "launcher"), node="launcher")
    node = EventWriter(events_file(tmp_path, "n0"), node="n0")
    launcher.write(JobStarted(time_s=1.0), source="launcher")
    node.write(WorkerStarted(time_s=2.0, seat="trainer/0", pid=7), source="agent")
    node.write(StepDone(time_s=5.0, seat="trainer/0", step=1), source="worker")
    with (tmp_path / "logs" / "trainer-0.log").open("wb") as log:
        log.write(stamp(3.0) + b"begins\n" + b"goes on\n" + stamp(6.0) + b"torn")
    history = RunHistory(tmp_path)
    first = list(history.new())
    assert [(each.time_s, each.kind, each.node) for each in first] == [
        (1.0, "job_started", "launcher"),
        (2.0, "worker_started", "n0"),
        (3.0, OUTPUT, "n0"),
        (3.0, OUTPUT, "n0"),
        (5.0, "step", "n0"),
    ]
    assert not history.ended
    launcher.write(JobEnded(time_s=7.0, ok=True), source="launcher")
    assert [each.kind for each in history.new(unfinished=True)] == [OUTPUT, "job_ended"]
    assert history.ended
    assert list(history.new(unfinished=True)) == []
    launcher.write(JobStarted(time_s=8.0), source="launcher")
    assert [each.kind for each in history.new()] == ["job_started"]
    assert not history.ended
    for writer in (launcher, node):
        writer.close()


def test_a_line_that_is_no_event_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    path = events_file(tmp_path, "n0")
    first, last = (UserEvent(time_s=float(i), name=f"e{i}", node="n0") for i in (1, 3))
    path.write_bytes(encode(first) + b"\nnonsense\n" + encode(first)[:20] + encode(last) + b"\n{")
    found = list(RunHistory(tmp_path).new())
    assert [(each.kind, each.time_s) for each in found] == [("e1", 1), (DAMAGED, 1), ("e3", 3)]
    assert "events-n0.jsonl" in found[1].text


def test_a_follower_misses_no_event_when_files_give_way(tmp_path: Path) -> None:
    writer = EventWriter(events_file(tmp_path, "n0"), node="n0", history_bytes=4000)
    history, seen = RunHistory(tmp_path), []
    for step in range(200):
        writer.write(StepDone(step=step, time_s=float(step + 1)), source="worker")
        if step % 7 == 0:
            seen += [each.time_s for each in history.new()]
    seen += [each.time_s for each in history.new()]
    assert seen == [float(step + 1) for step in range(200)]
    writer.close()


@pytest.mark.parametrize("every", [1, 3])
def test_a_follower_misses_no_output_when_a_log_is_emptied(tmp_path: Path, every: int) -> None:
    log = tmp_path / "trainer-0.log"
    lines, seen = PrintedLines(log), list[str]()
    with log.open("ab", buffering=0) as file:
        for number in range(100):
            file.write(f"line {number}\n".encode())
            if number % every == 0:
                seen += [text for _, text in lines.new()]
            bound(log, most_bytes=60)
    seen += [text for _, text in lines.new()]
    assert seen == [f"line {number}" for number in range(100)]


def test_what_a_log_had_before_it_was_emptied_comes_first(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    (tmp_path / "trainer-0.log.1").write_bytes(stamp(1.0) + b"old\n" + stamp(2.0) + b"ha")
    log.write_bytes(b"lf\n" + stamp(3.0) + b"new\rer\n")
    assert list(PrintedLines(log).new()) == [(1, "old"), (2, "ha"), (2, "lf"), (3, "new\ner")]


def test_a_line_without_a_time_has_that_of_the_last_change(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("plain\n")
    os.utime(log, (9.0, 9.0))
    assert list(PrintedLines(log).new()) == [(9.0, "plain")]
    assert list(PrintedLines(tmp_path / "none.log").new()) == []


def test_the_time_of_a_sidecar_s_line_is_local() -> None:
    time_s, rest = split_time(b"2026-01-31 09:26:53,589 INFO serves")
    assert time_s is not None
    assert rest == b"INFO serves"
    assert split_time(b"2026-99-31 09:26:53,589 INFO") == (None, b"2026-99-31 09:26:53,589 INFO")
