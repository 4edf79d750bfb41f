"""The lines of `holdfast run`: the narration as text or JSON, from a level on."""

from __future__ import annotations

import json

import pytest

from holdfast.elastic.events import CheckpointFailed, Detected, Event, StepDone
from holdfast.tools.show.levels import Importance
from holdfast.tools.show.telling import StoryTeller

FAILED = CheckpointFailed(step=4, error="the disk is full", in_a_row=1, fatal=False, newest=-1)
EVENTS: tuple[Event, ...] = (
    StepDone(step=1, time_s=1.0),
    Detected(what="exit", victim="trainer/0", why="killed by SIGKILL", time_s=2.0, node="n0"),
    FAILED,
)


def lines(form: str, least: Importance) -> list[str]:
    teller = StoryTeller(form=form, least=least)
    return [line for event in EVENTS for line in teller.lines(event)]


@pytest.mark.parametrize(
    ("least", "said"),
    [
        (Importance.DEBUG, ["step: step 1", "trainer/0 was killed", "the disk is full"]),
        (Importance.INFO, ["trainer/0 was killed", "the disk is full"]),
        (Importance.WARNING, ["trainer/0 was killed", "the disk is full"]),
        (Importance.ERROR, ["the disk is full"]),
    ],
)
def test_lines_of_a_level_and_above_are_told(least: Importance, said: list[str]) -> None:
    found = lines("text", least)
    assert [line.startswith(f"holdfast: {start}") for line, start in zip(found, said, strict=True)]
    assert [json.loads(line)["message"] for line in lines("json", least)] == [
        line.removeprefix("holdfast: ") for line in found
    ]


def test_a_line_for_machines_has_the_time_the_level_and_the_place() -> None:
    assert json.loads(lines("json", Importance.WARNING)[0]) == {
        "time_s": 2.0,
        "level": "warning",
        "message": "trainer/0 was killed by SIGKILL",
        "kind": "detected",
        "node": "n0",
        "seat": "",
    }


def test_the_outcome_is_told_at_every_level_and_a_remark_from_info_on() -> None:
    quiet, loud = (
        StoryTeller(form="json", least=level) for level in (Importance.ERROR, Importance(0))
    )
    assert json.loads(quiet.outcome("over", time_s=3.0)) == {
        "time_s": 3.0,
        "level": "error",
        "message": "over",
    }
    assert list(quiet.remark("by the way", time_s=3.0)) == []
    assert json.loads(next(loud.remark("by the way", time_s=3.0)))["level"] == "info"
    plain = StoryTeller(form="text", least=Importance.INFO)
    assert plain.outcome("over", time_s=3.0) == "holdfast: over"
    assert list(plain.remark("by the way", time_s=3.0)) == ["holdfast: by the way"]
