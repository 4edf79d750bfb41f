"""Borrowed groups in the ledger and before the checker."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from shared_runs import group_of

from holdfast.adapters.rl.ledger import borrowed_rules, borrowing
from holdfast.adapters.rl.ledger.borrowed_rules import BorrowedRow, BorrowedRules, borrowed_row
from holdfast.adapters.rl.ledger.borrowing import Borrowing
from holdfast.adapters.rl.ledger.states import LedgerError
from holdfast.adapters.rl.samples.borrowed import Borrowed, GroupOrigin, borrowed_from


def borrowed(ordinal: int, island: str = "oslo") -> tuple[Borrowed, ...]:
    return borrowed_from(group_of(island=island, ordinal=ordinal))


def test_a_group_is_recorded_once_due_at_its_step_and_gone_with_it() -> None:
    found = Borrowing()
    found.record([borrowed(4)], step=2)
    assert found.due(1) == []
    assert [sample.ordinal for sample in found.due(2)] == [4, 4]
    assert found.waiting == 1
    assert not found.may_take(borrowed(4)[0].origin)
    assert found.may_take(borrowed(4, island="rome")[0].origin)
    with pytest.raises(LedgerError, match="would borrow before step 2"):
        found.record([], step=3)
    assert found.train(2) == 1
    assert found.waiting == 0
    with pytest.raises(LedgerError, match="oslo/4 was borrowed before"):
        found.record([borrowed(4)], step=3)


def test_its_state_goes_through_a_snapshot() -> None:
    before, after = Borrowing(), Borrowing()
    before.record([borrowed(4), borrowed(7, island="rome")], step=2)
    after.load_state_dict(msgspec.json.decode(msgspec.json.encode(before.state_dict())))
    assert after.due(2) == before.due(2)
    assert after.state_dict() == before.state_dict()


def test_what_is_remembered_is_bounded_and_nothing_older_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(borrowing, "REMEMBERED", 3)
    found = Borrowing()
    for ordinal in (9, 5, 7, 8):
        found.record([borrowed(ordinal)], step=ordinal)
        found.train(ordinal)
    may = [ordinal for ordinal in range(12) if found.may_take(borrowed(ordinal)[0].origin)]
    assert may == [6, 10, 11]


ROWS = [borrowed_row(sample) for sample in borrowed(4)]
ORIGIN = ROWS[0].origin


def judged(rows: list[BorrowedRow], **facts: Any) -> list[str]:
    given = {"group": 2, "island": "lyon", "recorded": {ORIGIN}} | facts
    return list(BorrowedRules().check(3, rows, **given))


def test_a_group_that_was_recorded_is_right_once() -> None:
    rules = BorrowedRules()
    check: Callable[..., Any] = rules.check
    facts = {"group": 2, "island": "lyon", "recorded": {ORIGIN}}
    assert list(check(3, ROWS, **facts)) == []
    restored = BorrowedRules()
    restored.load_state_dict(msgspec.json.decode(msgspec.json.encode(rules.state_dict())))
    assert list(restored.check(4, ROWS, **facts)) == ["step 4 borrows oslo/4 again"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "facts", "said"),
    [
        pytest.param(ROWS, {"island": "oslo"}, "a group of its own", id="own"),
        pytest.param(ROWS, {"recorded": set()}, "no state recorded", id="not recorded"),
        pytest.param([], {}, "leaves oslo/4 out", id="left out"),
        pytest.param(ROWS[:1], {}, r"has samples \[0\]", id="half"),
        pytest.param([*ROWS, ROWS[0]], {}, r"has samples \[0, 0, 1\]", id="a sample twice"),
        pytest.param(
            [msgspec.structs.replace(row, logprobs=1) for row in ROWS],
            {},
            "2 tokens, 1 log-probabilities",
            id="log-probabilities",
        ),
        pytest.param(
            [
                msgspec.structs.replace(row, origin=GroupOrigin(island="", lineage="", ordinal=4))
                for row in ROWS
            ],
            {"recorded": {GroupOrigin(island="", lineage="", ordinal=4)}},
            "unknown origin",
            id="origin",
        ),
    ],
)
def test_what_is_wrong_with_borrowed_rows_is_said(
    rows: list[BorrowedRow], facts: dict[str, Any], said: str
) -> None:
    found = judged(rows, **facts)
    assert found
    assert any(re.search(said, what) for what in found)


def test_the_checkers_count_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowed_rules, "_COUNTED", 2)
    rules = BorrowedRules()
    for ordinal in (3, 4, 5):
        rows = [borrowed_row(sample) for sample in borrowed(ordinal)]
        recorded = {rows[0].origin}
        assert list(rules.check(ordinal, rows, group=2, island="lyon", recorded=recorded)) == []
    assert rules.state_dict() == [["oslo", "aa", 4, [4, 5]]]
