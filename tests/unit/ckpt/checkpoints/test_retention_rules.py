"""The rules alone determine the remaining steps, and every verdict has its reason."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.ckpt.checkpoints.retention_rules import (
    Best,
    PruneCandidate,
    Rules,
    duration,
    judge,
    parse_limit,
    ranked,
    value_at,
)
from holdfast.ckpt.state import plain

STEPS = [
    PruneCandidate(step=s, values={"loss": {"eval": 1 / (1 + abs(s - 300))}})
    for s in range(0, 600, 100)
]


def kept(
    rules: Rules, candidates: Sequence[PruneCandidate] = STEPS, *, good: int = 500
) -> list[int]:
    verdicts = judge(candidates, rules, newest_verified=good)
    assert all(verdict.reasons for verdict in verdicts)
    return [verdict.step for verdict in verdicts if verdict.keep]


def test_the_newest_stay() -> None:
    assert kept(Rules(keep_last=2)) == [400, 500]


def test_a_step_stays_when_any_rule_keeps_it() -> None:
    rules = Rules(keep_last=1, keep_every=200, keep_best=(Best.parse("loss.eval:max"),))
    assert kept(rules) == [0, 200, 300, 400, 500]


def test_the_newest_verified_stays_however_old_it_is() -> None:
    assert kept(Rules(keep_last=1, most_steps_old=0), good=100) == [100, 500]
    aged = [PruneCandidate(step=s, age_s=1e9) for s in (1, 2, 3)]
    assert kept(Rules(keep_last=3, most_age_s=1.0), aged, good=2) == [2]


def test_an_age_limit_ends_what_other_rules_keep_but_not_pins() -> None:
    pinned = [PruneCandidate(step=100, pinned=True), *STEPS[2:]]
    rules = Rules(keep_last=3, keep_every=100, most_steps_old=100)
    assert kept(rules, pinned) == [100, 400, 500]
    (_, verdict, *_) = judge(pinned, rules, newest_verified=500)
    assert verdict.reasons == ("300 steps older than the newest, the limit is 100",)


def test_steps_of_unknown_age_do_not_expire() -> None:
    there = [
        PruneCandidate(step=1),
        PruneCandidate(step=2, age_s=90.0),
        PruneCandidate(step=3, age_s=10.0),
    ]
    assert kept(Rules(keep_last=3, most_age_s=60.0), there, good=3) == [1, 3]


def test_the_best_are_ranked_and_what_is_no_number_is_left_out() -> None:
    values: list[Any] = [0.5, None, "low", True, {"$float": "nan"}, 0.1, 0.5]
    there = [PruneCandidate(step=n, values={"loss": value}) for n, value in enumerate(values)]
    assert ranked(there, Best.parse("loss:min")) == [(5, 0.1), (6, 0.5), (0, 0.5)]
    assert [s for s, _ in ranked(there, Best.parse("loss:max:2"))] == [6, 0, 5]
    verdicts = judge(
        there, Rules(keep_last=1, keep_best=(Best.parse("loss:min:3"),)), newest_verified=6
    )
    assert verdicts[0].reasons == ("3rd lowest loss (0.5)",)
    assert not verdicts[1].keep


def test_values_are_found_however_the_path_divides() -> None:
    values = {"a.b": {"c": 1}, "a": {"d.e": 2}, "f": 3}
    assert [value_at(values, path) for path in ("a.b.c", "a.d.e", "f", "g", "a.x")] == [
        1,
        2,
        3,
        None,
        None,
    ]


@pytest.mark.parametrize(
    "mapping",
    [
        {"z": 7, "loss": 5},
        OrderedDict(z=7, loss=5),
        Counter(loss=5),
        defaultdict(int, {"z": 7, "loss": 5}),
        {0: 1, "loss": 5},
    ],
)
def test_values_are_found_in_dicts_of_every_kind(mapping: Any) -> None:
    assert value_at({"a": plain.encode({"b": mapping}, "a")}, "a.b.loss") == 5


@pytest.mark.parametrize("text", ["loss", "loss:low", ":min", "loss:min:x", "loss:min:0"])
def test_a_metric_without_an_order_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"min|at least 1"):
        Best.parse(text)


def test_a_metric_may_contain_a_colon() -> None:
    assert Best.parse("eval:loss:min") == Best(metric="eval:loss", lowest=True)


@pytest.mark.parametrize(
    "fields",
    [{"keep_last": 0}, {"keep_every": 0}, {"most_age_s": -1.0}, {"most_steps_old": -1}],
)
def test_rules_that_cannot_be_meant_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least|negative"):
        Rules(**fields)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("7d", (604800.0, None)),
        ("1.5h", (5400.0, None)),
        ("2y", (2 * 365.25 * 86400, None)),
        ("5000steps", (None, 5000)),
        ("1 step", (None, 1)),
    ],
)
def test_age_limits_are_read(text: str, limit: tuple[float | None, int | None]) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize("text", ["7", "x", "-1d", "1z", ""])
def test_what_is_no_age_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="7d"):
        parse_limit(text)


def test_durations_are_told_in_the_unit_that_fits() -> None:
    assert [duration(s) for s in (0.5, 90, 7200, 86400 * 3, 86400 * 14)] == [
        "0.5s",
        "1.5m",
        "2h",
        "3d",
        "2w",
    ]
