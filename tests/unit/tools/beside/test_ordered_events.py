"""The events of a run in the order of their times, read late or as they appear."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.events import Event, JobEnded, JobStarted, StepDone
from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.tools.beside.reading import OrderedEvents


def write(run_dir: Path, node: str, *events: Event) -> None:
    writer = EventWriter(events_file(run_dir, node), node=node)
    for event in events:
        writer.write(event, source="worker")
    writer.close()


def steps(found: list[Event]) -> list[int]:
    return [event.step for event in found if isinstance(event, StepDone)]


def history(reader: OrderedEvents) -> list[Event]:
    return [event for batch in reader.history() for event in batch]


def test_the_history_of_several_files_comes_by_time_in_bounded_batches(tmp_path: Path) -> None:
    for node, first in (("a", 1), ("b", 2), ("c", 3)):
        write(tmp_path, node, *(StepDone(step=step, time_s=step) for step in range(first, 3000, 3)))
    batches = list(OrderedEvents(tmp_path).history())
    assert max(map(len, batches)) <= 1024
    assert steps([event for batch in batches for event in batch]) == list(range(1, 3000))


def test_what_appears_after_the_history_comes_once(tmp_path: Path) -> None:
    write(tmp_path, "a", StepDone(step=1, time_s=1))
    reader = OrderedEvents(tmp_path)
    assert steps(history(reader)) == [1]
    assert reader.new() == []
    write(tmp_path, "b", StepDone(step=3, time_s=3))
    write(tmp_path, "a", StepDone(step=2, time_s=2))
    assert steps(reader.new()) == [2, 3]
    assert reader.new() == []


def test_a_line_that_is_not_whole_yet_comes_when_it_is(tmp_path: Path) -> None:
    write(tmp_path, "a", StepDone(step=1, time_s=1), StepDone(step=2, time_s=2))
    path = events_file(tmp_path, "a")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    reader = OrderedEvents(tmp_path)
    assert steps(history(reader)) == [1]
    with path.open("ab") as file:
        file.write(whole[-9:])
    assert steps(reader.new()) == [2]


def test_a_damaged_line_is_counted(tmp_path: Path) -> None:
    events_file(tmp_path, "a").write_bytes(b"not an event\n")
    write(tmp_path, "a", StepDone(step=1, time_s=1))
    reader = OrderedEvents(tmp_path)
    assert steps(history(reader)) == [1]
    assert reader.damaged == 1


def test_a_job_is_over_until_it_is_started_again(tmp_path: Path) -> None:
    write(tmp_path, "launcher", JobStarted(time_s=1), JobEnded(ok=True, time_s=2))
    reader = OrderedEvents(tmp_path)
    history(reader)
    assert reader.over
    write(tmp_path, "launcher", JobStarted(time_s=3))
    reader.new()
    assert not reader.over


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere: no such directory; give the directory"):
        OrderedEvents(tmp_path / "nowhere")
