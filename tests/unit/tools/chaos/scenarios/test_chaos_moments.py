"""The names of events in scenarios and tests are checked before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.elastic.events import KINDS, FencingDone, UserEvent
from holdfast.tools.chaos.fixtures.running import matches
from holdfast.tools.chaos.scenarios.moments import moment_of, wrong_moment
from holdfast.tools.chaos.scenarios.scenario import Scenario, ScenarioError, parse


def scenario(**when: Any) -> Scenario:
    document = {"name": "x", "about": "", "workload": {"command": ["true"]}}
    return parse({**document, "fault": [{"kind": "kill", "when": when}]}, source="test")


@pytest.mark.parametrize("field", ["state", "recovery"])
@pytest.mark.parametrize("name", ["fenced", "checkpoint_done", "restarted", "own:evaluated"])
def test_every_kind_and_every_event_of_the_jobs_own_can_be_waited_for(
    field: str, name: str
) -> None:
    (fault,) = scenario(**{field: name}).fault
    assert getattr(fault.when, field) == name


@pytest.mark.parametrize("field", ["state", "recovery"])
@pytest.mark.parametrize("name", ["fence", "evaluated", "own:", "GenerationOverError"])
def test_another_name_is_refused_with_those_that_there_are(field: str, name: str) -> None:
    with pytest.raises(ScenarioError, match=rf"there is no event '{name}'.*own:NAME.*fenced"):
        scenario(**{field: name})


def test_the_fields_of_a_kind_are_checked_too() -> None:
    assert wrong_moment("fenced", ["generation"]) == ""
    assert "has no gen; it has" in wrong_moment("fenced", ["gen"])
    assert wrong_moment("own:evaluated", ["anything"]) == ""
    assert all(wrong_moment(name) == "" for name in KINDS)


def test_an_event_is_what_was_waited_for_by_kind_and_fields() -> None:
    fenced, own = FencingDone(generation=2), UserEvent(name="evaluated", fields={"score": 1.0})
    assert matches(fenced, "fenced", {"generation": 2})
    assert not matches(fenced, "fenced", {"generation": 3})
    assert moment_of(own) == "own:evaluated"
    assert matches(own, "own:evaluated", {"score": 1.0})
    assert not matches(own, "evaluated", {})
