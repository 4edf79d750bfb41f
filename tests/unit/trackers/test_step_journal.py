"""A journal has every step that was added, without what was being written as its process died."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.adapters.trackers.journal import StepJournal


def add(path: Path, *steps: int) -> dict[int, dict[str, float]]:
    journal = StepJournal(path)
    known = journal.open()
    for step in steps:
        journal.add(step, {"loss": step / 2})
    journal.close()
    return known


def test_steps_come_back_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "steps.jsonl"
    assert add(path, 0, 1) == {}
    assert add(path, 2) == {0: {"loss": 0.0}, 1: {"loss": 0.5}}
    assert list(add(path)) == [0, 1, 2]


@pytest.mark.parametrize("torn", [1, 5, 20])
def test_a_torn_line_is_removed_before_the_next_is_added(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "steps.jsonl"
    add(path, 0, 1)
    path.write_bytes(path.read_bytes()[:-torn])
    assert list(add(path, 7)) == [0]
    assert list(add(path)) == [0, 7]


def test_values_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    journal = StepJournal(tmp_path / "steps.jsonl")
    journal.open()
    given = {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 0.1}
    journal.add(0, given)
    journal.close()
    assert repr(add(tmp_path / "steps.jsonl")) == repr({0: given})
