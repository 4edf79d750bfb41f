"""The checker finds every planted violation, and none in a correct step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from holdfast.adapters.rl.ledger.checker import (
    CheckConfig,
    Consumer,
    ObservedStep,
    SampleRow,
    StepChecker,
    observe,
)
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.samples.trajectory import Stamp, TurnLimits

GROUP = 2


def row(ordinal: int, sample: int, *, version: int, generation: int = 1, **other: Any) -> SampleRow:
    stamps = (Stamp(generation=generation, version=version, count=3),)
    facts = {"tokens": 3, "logprobs": 3, "stamps": stamps, **other}
    return SampleRow(ordinal=ordinal, sample=sample, **facts)


def step(number: int, **other: Any) -> ObservedStep:
    """Return the checker's input for a step of two ordinals, while two more are open."""
    own = range(2 * number, 2 * number + 2)
    facts: dict[str, Any] = {
        "step": number,
        "rows": tuple(row(o, s, version=max(0, number - 1)) for o in own for s in range(GROUP)),
        "group": GROUP,
        "eta": 1,
        "admitted": own.stop + 2,
        "states": {own[0]: "ready", own[1]: "ready", own.stop: "running", own.stop + 1: "pending"},
        "cuts": {1: 0},
        "consumers": (Consumer(name="w", generation=1, version=number),),
        "pinned": False,
    }
    return ObservedStep(**(facts | other))


def changed(seen: ObservedStep, index: int, **other: Any) -> tuple[SampleRow, ...]:
    rows = list(seen.rows)
    rows[index] = msgspec.structs.replace(rows[index], **other)
    return tuple(rows)


def test_a_run_as_it_should_be_has_no_violation_and_the_count_survives_a_restore() -> None:
    checker = StepChecker()
    for number in range(3):
        assert checker.check(step(number)) == []
    restored = StepChecker()
    restored.load_state_dict(json.loads(json.dumps(checker.state_dict())))
    assert restored.check(step(3)) == []
    assert restored.check(step(3)), "the same step again"
    assert restored.count == len(restored.violations)
    again = StepChecker()
    again.load_state_dict(restored.state_dict())
    assert (again.count, again.violations) == (restored.count, restored.violations)


PLANTED: dict[str, tuple[Callable[[ObservedStep], dict[str, Any]], str]] = {
    "trained again": (
        lambda seen: {"rows": tuple(row(o, s, version=1) for o in (2, 3) for s in (0, 1))},
        r"trains ordinals \[2, 3\] again",
    ),
    "one left out": (
        lambda seen: {"rows": tuple(row(o, s, version=1) for o in (5, 6) for s in (0, 1))},
        r"trains ordinals \[5, 6\], next in order is 4",
    ),
    "out of order": (lambda seen: {"rows": tuple(reversed(seen.rows))}, "out of order"),
    "trained and open": (
        lambda seen: {"states": {**seen.states, 1: "ready"}},
        r"ordinals \[1\] are trained and ready",
    ),
    "in no state": (
        lambda seen: {"states": {o: s for o, s in seen.states.items() if o != 6}},
        r"ordinals \[6\] are in no state",
    ),
    "a state there is not": (
        lambda seen: {"states": {**seen.states, 6: "trained"}},
        r"open ordinals \[6\] are trained",
    ),
    "never admitted": (
        lambda seen: {"states": {**seen.states, 9: "running"}},
        r"ordinals \[9\] were never admitted",
    ),
    "a log-probability less": (
        lambda seen: {"rows": changed(seen, 1, logprobs=2)},
        r"sample \(4, 1\): 3 tokens, 2 log-probabilities, 3 versions",
    ),
    "a version more": (
        lambda seen: {"rows": changed(seen, 1, stamps=(Stamp(generation=1, version=1, count=4),))},
        "3 tokens, 3 log-probabilities, 4 versions",
    ),
    "no tokens": (
        lambda seen: {"rows": changed(seen, 0, tokens=0, logprobs=0, stamps=())},
        "0 tokens",
    ),
    "too stale": (
        lambda seen: {"rows": changed(seen, 2, stamps=(Stamp(generation=1, version=0, count=3),))},
        "sampled by version 0, staler than 1",
    ),
    "of the future": (
        lambda seen: {"rows": changed(seen, 2, stamps=(Stamp(generation=1, version=3, count=3),))},
        "not there before step 2",
    ),
    "rolled back": (
        lambda seen: {"cuts": {1: 0, 2: 0}},
        "sampled by rolled-back version 1 of generation 1",
    ),
    "a sample twice": (
        lambda seen: {"rows": changed(seen, 1, sample=0)},
        r"ordinal 4 has samples \[0, 0\]",
    ),
    "a sample missing": (lambda seen: {"rows": seen.rows[1:]}, r"ordinal 4 has samples \[1\]"),
    "dropped and trained": (lambda seen: {"dropped": frozenset({4})}, "dropped ordinal 4"),
    "a consumer went back": (
        lambda seen: {"consumers": (Consumer(name="w", generation=1, version=0),)},
        "w went from version 1 back to 0 in generation 1",
    ),
    "a consumer has rolled-back weights": (
        lambda seen: {"cuts": {1: 0, 2: 1}},
        "w samples with rolled-back version 2 of generation 1",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name: str) -> None:
    plant, said = PLANTED[name]
    checker = StepChecker()
    assert checker.check(step(0)) == checker.check(step(1)) == []
    seen = step(2)
    found = checker.check(msgspec.structs.replace(seen, **plant(seen)))
    assert any(re.search(said, what) for what in found), found
    assert checker.count == len(found)


def test_pinned_consumers_may_go_back_for_work_that_another_lost() -> None:
    checker = StepChecker()
    assert checker.check(step(0)) == checker.check(step(1)) == []
    back = (Consumer(name="w", generation=1, version=0),)
    assert checker.check(step(2, consumers=back, pinned=True)) == []


def test_what_is_reused_on_purpose_is_no_violation() -> None:
    checker = StepChecker()
    assert checker.check(step(0)) == []
    seen = step(1)
    rows = (row(0, 0, version=0), row(0, 1, version=0), *seen.rows)
    more = msgspec.structs.replace(seen, rows=rows)
    assert checker.check(msgspec.structs.replace(more, reused=frozenset({0}))) == []


def test_any_order_is_right_where_none_was_promised_but_nothing_twice() -> None:
    checker = StepChecker()
    loose: dict[str, Any] = {"in_order": False, "admitted": 4, "consumers": ()}
    states = dict.fromkeys(range(4), "ready")
    assert checker.check(step(1, states=states, **loose)) == []
    found = checker.check(step(1, states={0: "ready", 1: "ready"}, **loose))
    assert found == ["step 1 trains ordinals [2, 3] again"]
    assert checker.check(step(0, states={0: "ready", 1: "ready"}, **loose)) == []


def spoken(number: int, *, books: tuple[int, ...]) -> ObservedStep:
    """Return a step in which one policy spoke two tokens of each sample, another the third."""
    seen = step(number)
    rows = tuple(msgspec.structs.replace(each, spoken=(2, 1)) for each in seen.rows)
    return msgspec.structs.replace(seen, rows=rows, books=books)


def test_a_token_in_the_book_of_another_policy_is_a_violation() -> None:
    checker = StepChecker()
    assert checker.check(spoken(0, books=(0, 0))) == []
    assert checker.check(spoken(1, books=(8, 4))) == []
    restored = StepChecker()
    restored.load_state_dict(json.loads(json.dumps(checker.state_dict())))
    (found, other) = restored.check(spoken(2, books=(15, 9)))
    assert "the book of policy 0 has 15 trained tokens, and 16 were trained" in found
    assert "the book of policy 1 has 9 trained tokens, and 8 were trained" in other


def test_a_speaker_that_the_job_does_not_have_is_a_violation() -> None:
    found = StepChecker().check(spoken(0, books=(0,)))
    assert len(found) == 4
    assert "sample (0, 0) has an unknown speaker" in found[0]


def test_log_probabilities_that_are_off_are_a_violation() -> None:
    checker = StepChecker()
    assert checker.recomputed((3, 1), 9e-6, tolerance=1e-5) == []
    (found,) = checker.recomputed((3, 1), 2e-5, tolerance=1e-5)
    assert "sample (3, 1)" in found
    assert checker.count == 1


def test_words_are_bounded_and_the_count_is_not() -> None:
    checker = StepChecker()
    for _ in range(300):
        checker.recomputed((0, 0), 1.0, tolerance=1e-5)
    assert (checker.count, len(checker.violations)) == (300, 100)


def test_a_ledgers_step_is_seen_with_its_dropped_ordinals() -> None:
    limits = TurnLimits(end=10, context=8, max_new_tokens=4)
    plan = BatchPlan(groups=2, group=2, eta=0, steps=2, limits=limits, mode=Mode.SYNC)
    ledger, checker = Ledger(plan), StepChecker()
    ledger.resume(1, restored=0)
    ledger.admit(0, lambda ordinal: (1,) * (9 if ordinal else 3))
    for each in ledger.claim("w", free=4, version=None):
        ledger.deliver(
            msgspec.structs.replace(
                each.trajectory,
                tokens=(5, 10),
                logprobs=(-1.0, -2.0),
                stamps=(Stamp(generation=1, version=0, count=2),),
            )
        )
    batch = ledger.batch(0)
    assert batch is not None
    seen = observe(ledger, 0, batch)
    assert seen.dropped == {1}
    assert checker.check(seen) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recompute_every": -1}, "recompute_every is -1"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CheckConfig(**settings)
