"""A rule names the remedy for a wrong type or range; `check` names call, argument and value."""

from __future__ import annotations

import math

import pytest

from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError

HELP = "give another"


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (checks.count(1, remedy=HELP), [1, 2**63 - 1], [0, -1, True, 1.0, "1", None, math.nan]),
        (
            checks.number(0, 4, remedy=HELP),
            [0, 4, 0.5],
            [-1, 4.1, math.nan, math.inf, True, "1", 10**400, None],
        ),
        (checks.number(0, math.inf, remedy=HELP, above=True), [1, math.inf], [0, 0.0, -0.0]),
        (checks.text(remedy=HELP), ["a"], ["", b"a", 3, None]),
        (checks.texts(remedy=HELP), ["a", ["a", "b"], ()], [3, None, ["a", 3], b"a"]),
        (checks.flag(remedy=HELP), [True, False], [0, 1, "no", None]),
        (checks.instance(dict, remedy=HELP), [{}], [[], None, dict]),
        (checks.size_or_none(remedy=HELP), [None, "1GiB", 1], [0, True, 1.5, b"1GiB"]),
        (checks.optional(checks.flag(remedy=HELP)), [None, True], [0, ""]),
        (checks.either("auto", checks.count(1, remedy=HELP)), ["auto", 1], ["all", 0, None]),
    ],
)
def test_a_rule_refuses_another_type_and_what_is_out_of_range(
    rule: checks.Rule, right: list[object], wrong: list[object]
) -> None:
    assert [rule(value) for value in right] == [""] * len(right)
    assert [rule(value) for value in wrong] == [HELP] * len(wrong)


def test_a_number_that_no_message_holds_is_too_large() -> None:
    assert checks.count(1, remedy=HELP)(1 << 63) == "give a number below 2**63"


def test_the_remedy_of_a_choice_lists_the_names() -> None:
    rule = checks.one_of("retry", "skip", "stop")
    assert rule("skip") == ""
    assert rule("cry") == rule(["skip"]) == "give 'retry', 'skip' or 'stop'"


def test_the_error_names_call_argument_value_and_remedy() -> None:
    rules = {"nodes": checks.count(1, remedy="give 1 or more nodes")}
    checks.check("plan", {"nodes": 2}, rules, error=ArgumentError)
    with pytest.raises(ArgumentError, match=r"^plan\(nodes='two'\): give 1 or more nodes$"):
        checks.check("plan", {"nodes": "two"}, rules, error=ArgumentError)


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(checks.shown("a" * 10_000)) == 201
