"""The page of events: every kind and every field has a sentence."""

from __future__ import annotations

import pytest
from hooks.events_page import events_page, fields_of, sentence_of

from holdfast.ckpt.events import Event
from holdfast.elastic.events import KINDS


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_and_its_fields_are_documented(name: str) -> None:
    kind = KINDS[name]
    assert sentence_of(kind).endswith("."), f"{kind.__name__} has no docstring"
    assert [field.name for field in fields_of(kind)] == list(kind.__struct_fields__)
    for field in fields_of(kind):
        assert field.meaning.endswith("."), f"{kind.__name__}.{field.name} has no sentence"


def test_the_page_has_a_section_for_every_kind_with_its_fields_and_units() -> None:
    page = events_page()
    for name in KINDS:
        assert page.count(f"### `{name}`\n") == 1
    assert "| `stall_s` | number | s | Seconds in which snapshots held training up. |" in page
    assert "| `restore_step` | integer or null |  | Step in memory" in page
    assert "``" not in page.replace("```", "")


def test_the_fields_of_every_event_are_there_once() -> None:
    page = events_page()
    for field in fields_of(Event):
        assert page.count(f"| `{field.name}` |") == 1
