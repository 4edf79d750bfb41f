"""Events written in every version of the format still open, with all their facts.

The code of that version wrote `events/v1`: two short jobs, and an event of every kind that they
lack. `story.json` is the timeline that it made of a job. `events/v2.json` lists the kinds, fields
and types of the present version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hooks.events_page import fields_of

from holdfast.ckpt.events import VERSION
from holdfast.elastic.events import KINDS, UserEvent, decode, encode, of_kind
from holdfast.elastic.events.log import EventReader
from holdfast.tools.report import timeline

EVENTS = Path(__file__).parent / "events"
JOBS = ("rl", "supervised")

RENAMED = {
    ("step", "start"): "start_s",
    ("weights_pulled", "saved"): "saved_bytes",
    ("rollout_tail", "length_p50"): "length_p50_tokens",
    ("rollout_tail", "length_p95"): "length_p95_tokens",
    ("rollout_tail", "length_max"): "length_max_tokens",
    ("rollout_tail", "waited_s_p50"): "waited_p50_s",
    ("rollout_tail", "waited_s_p95"): "waited_p95_s",
    ("rollout_tail", "waited_s_max"): "waited_max_s",
    ("rollout_tail", "carried"): "carried_tokens",
}
SINCE = {
    "approximate",
    "environment_unprotected",
    "events_lost",
    "group_left_out",
    "groups_borrowed",
    "groups_shared",
    "island_joined",
    "island_left",
    "ledger",
    "policy_awaited",
    "restore_progress",
    "role_moved",
    "roles_asked",
    "tide_adopted",
    "tide_published",
    "weights_given",
    "work_progress",
}
"""Kinds that version 1 did not have."""

GONE = {("fault", "pid")}  # the first of its pids


def lines() -> Iterator[dict[str, Any]]:
    for path in sorted((EVENTS / "v1").rglob("events-*.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())


def test_the_sample_has_every_kind_of_its_version() -> None:
    assert {line["kind"] for line in lines()} == {*KINDS, "evaluated", "regrid"} - SINCE


def test_every_fact_of_an_old_event_is_in_the_one_that_is_read() -> None:
    for line in lines():
        kind = line["kind"]
        found = json.loads(encode(decode(json.dumps(line).encode())))
        assert (found["time_s"], found["v"]) == (line["t"], VERSION)
        for name, value in line.items():
            if name == "t" or (kind, name) in GONE:
                continue
            if kind == "metric" and name not in found:
                assert found["values"][name] == value
            else:
                assert found[RENAMED.get((kind, name), name)] == value, (kind, name)


@pytest.mark.parametrize("job", JOBS)
def test_an_old_job_has_the_story_that_it_had(job: str) -> None:
    story = timeline.build(EventReader(EVENTS / "v1" / job).new())
    document = json.loads((EVENTS / "v1" / job / "story.json").read_text())
    assert json.loads(msgspec.json.encode(story)) == document


def test_an_old_event_of_the_users_own_is_one_still() -> None:
    (own,) = of_kind(EventReader(EVENTS / "v1" / "supervised").new(), UserEvent)
    assert (own.name, own.seat, own.fields) == ("evaluated", "trainer/0", {"step": 3, "score": 0.5})


def test_no_kind_or_field_of_this_version_is_gone_or_another() -> None:
    """Add new events to ``v2.json``; if this fails, the version must change."""
    stored = json.loads((EVENTS / f"v{VERSION}.json").read_text())
    now = {name: {f.name: f.type for f in fields_of(kind)} for name, kind in KINDS.items()}
    for name, fields in stored.items():
        assert now.get(name, {}) | fields == now.get(name), name
    assert now == stored, "a kind or a field is not stored yet"
