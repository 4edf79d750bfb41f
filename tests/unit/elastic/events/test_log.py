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


def test_what_a_full_disk_refuses_is_counted_and_never_raised(
    tmp_path: Path,
) -> None:
    path = events_file(tmp_path, "n0")
    writer = EventWriter(path, node="n0")
    writer.write(UserEvent(name="first"), source="agent")
    whole = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for room in (0, 10):  # nothing fits; half a line does
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + room, hard))
            writer.write(UserEvent(name="refused"), source="agent")
            assert path.read_bytes() == whole
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
