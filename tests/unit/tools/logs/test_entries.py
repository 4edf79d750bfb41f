"""The history's lines: their order, their choice, their text."""

from __future__ import annotations

import json
from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.elastic.events import Detected, StepDone, UserEvent, WorkerStarted
from holdfast.tools.logs.entries import OUTPUT, HistoryLine, Wanted, as_json, as_text, merged
from holdfast.tools.show.levels import Importance

STARTED = HistoryLine.of(
    WorkerStarted(time_s=2.0, node="n0", source="agent", seat="trainer/0", pid=7)
)
LOST = HistoryLine.of(
    Detected(time_s=3.0, node="n0", source="agent", what="node_lost", victim="n1")
)
STEP = HistoryLine.of(StepDone(time_s=4.0, node="n1", source="worker", seat="trainer/1", step=3))
PRINTED = HistoryLine(
    time_s=5.5, node="n1", seat="trainer/1", kind=OUTPUT, level=Importance.INFO, text="loss 0.5"
)


def numbered(times: list[float]) -> list[HistoryLine]:
    return [HistoryLine.of(UserEvent(name="e", time_s=time_s)) for time_s in times]


@given(st.lists(st.lists(st.floats(0, 1e9), max_size=20), max_size=5))
def test_many_files_are_one_history_in_time_order(files: list[list[float]]) -> None:
    found = [entry.time_s for entry in merged([numbered(times) for times in files])]
    assert found == sorted(time_s for times in files for time_s in times)


def test_equal_times_stay_in_the_order_of_their_file() -> None:
    entries = [HistoryLine.of(UserEvent(name=f"e{i}", time_s=1.0)) for i in range(50)]
    assert [entry.kind for entry in merged([entries])] == [f"e{i}" for i in range(50)]


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        (Wanted(), [STARTED, LOST, PRINTED]),
        (Wanted(least=Importance.DEBUG), [STARTED, LOST, STEP, PRINTED]),
        (Wanted(least=Importance.WARNING), [LOST]),
        (Wanted(since_s=3.0), [LOST, PRINTED]),
        (Wanted(nodes=frozenset({"n1"})), [LOST, PRINTED]),
        (Wanted(least=Importance.DEBUG, kinds=frozenset({"step", OUTPUT})), [STEP, PRINTED]),
    ],
)
def test_a_part_of_the_history_can_be_asked_for(wanted: Wanted, taken: list[HistoryLine]) -> None:
    assert [each for each in (STARTED, LOST, STEP, PRINTED) if wanted.takes(each)] == taken


def test_a_line_for_people() -> None:
    assert [as_text(each, zone=UTC) for each in (STARTED, LOST, PRINTED)] == [
        "1970-01-01 00:00:02.000 n0: trainer/0 starts, process 7",
        "1970-01-01 00:00:03.000 n0 agent: WARNING n1 was lost",
        "1970-01-01 00:00:05.500 n1 trainer/1: | loss 0.5",
    ]


def test_a_line_for_machines_has_the_fields_of_the_event() -> None:
    assert json.loads(as_json(STARTED)) == {
        "time_s": 2.0,
        "level": "info",
        "node": "n0",
        "seat": "trainer/0",
        "kind": "worker_started",
        "message": "trainer/0 starts, process 7",
        "fields": {"pid": 7, "attempt": 0},
    }
    assert json.loads(as_json(PRINTED))["fields"] == {}
    own = HistoryLine.of(UserEvent(name="evaluated", fields={"score": 1}))
    assert json.loads(as_json(own))["fields"] == {"score": 1}
