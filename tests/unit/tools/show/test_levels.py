"""Events have a level, and the levels have an order."""

from __future__ import annotations

import pytest

from holdfast.elastic.events import (
    KINDS,
    Detected,
    Event,
    JobEnded,
    StepDone,
    UserEvent,
    WorkerExited,
    WorkerRehearsed,
)
from holdfast.tools.show.levels import LEVELS, Importance, importance

REHEARSED = WorkerRehearsed(rank=0, world=2, error="no data", over=False, seconds=1.0)


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (StepDone(step=1), "debug"),
        (UserEvent(name="evaluated"), "info"),
        (Detected(what="join", victim="n1"), "info"),
        (Detected(what="exit", victim="trainer/0"), "warning"),
        (WorkerExited(pid=1, status="exit status 0"), "info"),
        (WorkerExited(pid=1, status="killed by SIGKILL"), "warning"),
        (REHEARSED, "warning"),
        (JobEnded(ok=True), "info"),
        (JobEnded(ok=False), "error"),
    ],
)
def test_an_event_has_the_level_of_its_news(event: Event, level: str) -> None:
    assert importance(event).word == level


def test_the_words_are_in_order() -> None:
    assert LEVELS == ("debug", "info", "warning", "error")
    assert [Importance[word.upper()] for word in LEVELS] == sorted(Importance)
    assert "step" in KINDS
