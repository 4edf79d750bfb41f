"""Event files: whole lines, read once by each follower."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path

import pytest

from holdfast.elastic.events import (
    EventFormatError,
    EventsLost,
    MetricsLogged,
    NodeLeaving,
    StepDone,
    UserEvent,
    decode,
    encode,
)
from holdfast.elastic.events.log import EventReader, EventWriter, events_file


def test_events_are_read_whole_and_once_by_time(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert reader.new() == []
    writer = EventWriter(events_file(tmp_path, "n0"), node="n0")
    writer.write(StepDone(time_s=2.0, node="x", seat="trainer/0", step=1), source="worker")
    writer.write(MetricsLogged(time_s=1.0, step=1), source="worker")
    half = encode(UserEvent(time_s=3.0, name="half"))
    with events_file(tmp_path, "n1").open("wb") as file:
        file.write(half[:-1])
    metric, step = reader.new()
    assert metric == MetricsLogged(time_s=1.0, node="n0", source="worker", step=1)
    assert (step.kind, step.node, step.seat) == ("step", "n0", "trainer/0")
    with events_file(tmp_path, "n1").open("ab") as file:
        file.write(half[-1:] + b"\n")
    assert [event.kind for event in reader.new()] == ["half"]
    writer.close()
    writer.write(NodeLeaving(reason="late"), source="agent")
    assert reader.new() == []


def test_an_event_without_a_time_happens_when_it_is_written(tmp_path: Path) -> None:
    writer = EventWriter(events_file(tmp_path, "n0"), node="n0")
    writer.write(NodeLeaving(reason="in time"), source="agent")
    (event,) = EventReader(tmp_path).new()
    assert abs(event.time_s - time.time()) < 60
    writer.close()


def test_a_line_that_is_no_event_is_named_with_its_file(tmp_path: Path) -> None:
    events_file(tmp_path, "n0").write_text("nonsense\n")
    with pytest.raises(EventFormatError, match=r"events-n0\.jsonl: not an event"):
        EventReader(tmp_path).new()


def test_an_event_behind_the_beginning_of_another_is_read(tmp_path: Path) -> None:
    first, cut, last = (UserEvent(time_s=float(i), name=f"e{i}") for i in (1, 2, 3))
    path = events_file(tmp_path, "n0")
    path.write_bytes(encode(first) + b"\n")
    for length in range(len(encode(cut)) + 1):  # a killed process may leave so much of its write
        with path.open("ab") as file:
            file.write(encode(cut)[:length] + encode(last) + b"\n")
    found = EventReader(tmp_path).new()
    assert found == [first, cut] + [last] * (len(encode(cut)) + 1)


def test_what_a_full_disk_refuses_is_counted_and_never_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = events_file(tmp_path, "n0")
    writer = EventWriter(path, node="n0")
    writer.write(UserEvent(name="first"), source="agent")
    whole = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for room in (10, 0):  # half a line fits; nothing does
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + room, hard))
            writer.write(UserEvent(name="refused"), source="agent")
            assert len(path.read_bytes()) == len(whole) + 10
            assert EventReader(tmp_path).new() == [decode(whole)]
        (said,) = caplog.messages
        assert said == f"{path}: events are lost: No space left on device"
        lost_for_good = EventWriter(path, node="n0")
        lost_for_good.write(UserEvent(name="refused"), source="agent")
        lost_for_good.close()
        assert caplog.messages[-1] == f"{path}: events lost: 1"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    writer.write(UserEvent(name="again"), source="agent")
    writer.write(UserEvent(name="last"), source="agent")
    writer.close()
    first, again, lost, last = EventReader(tmp_path).new()
    assert isinstance(lost, EventsLost)
    assert lost.count == 2
    assert [each.kind for each in (first, again, last)] == ["first", "again", "last"]


def test_event_files_stay_within_a_bound_and_a_follower_misses_nothing(tmp_path: Path) -> None:
    writer = EventWriter(events_file(tmp_path, "n0"), node="n0", history_bytes=4000)
    reader = EventReader(tmp_path)
    seen: list[int] = []
    for step in range(300):
        writer.write(StepDone(step=step, time_s=float(step + 1)), source="worker")
        if step % 7 == 0:
            seen += [event.step for event in reader.new() if isinstance(event, StepDone)]
    writer.close()
    seen += [event.step for event in reader.new() if isinstance(event, StepDone)]
    assert seen == list(range(300))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["events-n0.before.jsonl", "events-n0.jsonl"]
    assert all(file.stat().st_size < 2300 for file in files)
    late = [event.step for event in EventReader(tmp_path).new() if isinstance(event, StepDone)]
    assert late == list(range(late[0], 300)), "the newest events are kept, without a gap"


def test_a_writer_whose_next_file_cannot_be_made_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    writer = EventWriter(events_file(folder, "n0"), node="n0")
    writer.write(StepDone(step=1), source="worker")
    most_bytes = events_file(folder, "n0").stat().st_size + 20  # lines differ by some digits
    monkeypatch.setattr(writer, "_most_bytes", most_bytes)
    writer.write(StepDone(step=2), source="worker")
    away = folder.rename(tmp_path / "away")
    writer.write(StepDone(step=3), source="worker")
    away.rename(folder)
    writer.write(StepDone(step=4), source="worker")
    found = EventReader(folder).new()
    assert [event.step for event in found if isinstance(event, StepDone)] == [1, 2, 4]
    assert [event.count for event in found if isinstance(event, EventsLost)] == [1]
    writer.close()


def test_two_writers_of_one_file_begin_the_next_one_together(tmp_path: Path) -> None:
    path = events_file(tmp_path, "n0")
    writers = [EventWriter(path, node="n0", history_bytes=4000) for _ in range(2)]
    reader, seen = EventReader(tmp_path), []
    for step in range(120):  # the second one still has the renamed file when it writes again
        writers[step % 20 >= 10].write(StepDone(step=step, time_s=float(step + 1)), source="worker")
        seen += [event.step for event in reader.new() if isinstance(event, StepDone)]
    assert seen == list(range(120))
    late = [event.step for event in EventReader(tmp_path).new() if isinstance(event, StepDone)]
    assert late == list(range(late[0], 120))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 2000
    for writer in writers:
        writer.close()
