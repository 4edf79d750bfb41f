"""The scheduling of rollouts, one sentence each: lengths, budgets, limits, metrics, settings."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.ledger.budget import Pressure, TokenBudget, pressure
from holdfast.adapters.rl.ledger.claim_order import Lengths, remaining
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.ledger.states import DeliveryVerdict
from holdfast.adapters.rl.ledger.tail_figures import Tail, percentile
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory, TurnLimits
from holdfast.elastic.events import StepTail

END = 10


def make_ledger(
    *, completed: int = 0, eta: int = 2, steps: int = 8, most: int = 30, **scheduling: Any
) -> Ledger:
    """Return a ledger of 2 groups of 2 samples per step, in mode bounded."""
    plan = BatchPlan(
        groups=2,
        group=2,
        eta=eta,
        steps=steps,
        limits=TurnLimits(end=END, context=80, max_new_tokens=most),
        mode=Mode.BOUNDED,
        scheduling=Scheduling(**scheduling),
    )
    ledger = Ledger(plan)
    ledger.resume(1, restored=0)
    ledger.admit(completed, prompt_of)
    return ledger


def prompt_of(ordinal: int) -> Tokens:
    return tuple(f"p{ordinal}>".encode())


def sampled(ordinal: int, sample: int, tokens: str = "ab\n", *, version: int = 0) -> Trajectory:
    return Trajectory(
        ordinal=ordinal,
        sample=sample,
        prompt=prompt_of(ordinal),
        tokens=tuple(tokens.encode()),
        logprobs=(-0.5,) * len(tokens),
        stamps=(Stamp(generation=1, version=version, count=len(tokens)),),
    )


def finish(ledger: Ledger, *ordinals: int, version: int = 0, tokens: str = "ab\n") -> None:
    for ordinal in ordinals:
        for sample in range(2):
            done = sampled(ordinal, sample, tokens, version=version)
            assert ledger.deliver(done) is DeliveryVerdict.ACCEPTED


def train(ledger: Ledger) -> list[int]:
    step = ledger.trained_steps
    batch = ledger.batch(step)
    assert batch is not None
    ledger.train(step)
    ledger.admit(step + 1, prompt_of)
    assert ledger.check() == []
    return sorted({each.ordinal for each in batch})


# -- order and over-provisioning -------------------------------------------------------------


def test_by_arrival_a_step_takes_the_groups_that_are_complete() -> None:
    ledger = make_ledger(order="arrival")
    ledger.claim("w", free=99, version=0)
    finish(ledger, 5, 3)
    assert train(ledger) == [3, 5]
    assert ledger.taken(0) == (3, 5)
    assert ledger.deliver(sampled(3, 0)) is DeliveryVerdict.DUPLICATE
    assert ledger.counts()["trained"] == 2


def test_by_arrival_a_straggler_is_waited_for_in_the_last_step_that_may_take_it() -> None:
    ledger = make_ledger(order="arrival", over_provision=0.5)
    assert ledger.admitted == 3
    ledger.claim("w", free=2, version=0)  # ordinal 0, the straggler
    for step, pair in enumerate([(1, 2), (3, 4)]):
        assert ledger.awaited() == {0, pair[0]}
        finish(ledger, *pair, version=step)
        assert train(ledger) == list(pair)
    finish(ledger, 5, 6, version=2)
    assert ledger.batch(2) is None
    assert ledger.awaited() == {0}
    finish(ledger, 0)
    assert train(ledger) == [0, 5]
    assert ledger.staleness_max == 2


def test_a_group_begins_with_the_version_that_its_worker_has_where_there_is_room() -> None:
    ledger = make_ledger(order="arrival", over_provision=1.0)
    for step, pair in enumerate([(0, 1), (2, 3), (4, 5)]):
        finish(ledger, *pair, version=step)
        train(ledger)
    (old,) = ledger.claim("w", free=1, version=1)
    assert old.version == 1
    (young,) = ledger.claim("w", free=1, version=3)
    assert (young.version, young.trajectory.ordinal) == (1, old.trajectory.ordinal)
    others = ledger.claim("w", free=99, version=3)
    assert [each.version for each in others] == [3] * 6


def test_a_sample_that_no_step_has_room_for_any_more_is_refused_and_done_again() -> None:
    ledger = make_ledger(order="arrival", eta=1, over_provision=1.0)
    finish(ledger, 0, 1)
    train(ledger)
    ledger.claim("w", free=4, version=0)  # 2 and 3 are due by step 1: it is full
    assert ledger.deliver(sampled(4, 0, version=0)) is DeliveryVerdict.TOO_OLD
    assert ledger.hold("v", [(4, 1)], oldest={(4, 1): 0}) == {(4, 1)}
    assert ledger.hold("v", [(4, 1)], oldest={(4, 1): 1}) == set()
    assert ledger.counters.samples_too_old == 2
    assert ledger.check() == []


def test_what_arrived_and_what_is_due_comes_back_with_the_state() -> None:
    ledger = make_ledger(order="arrival")
    ledger.claim("w", free=6, version=0)
    finish(ledger, 4, 2)
    ledger.set_aside(sampled(0, 0, "abc"))
    restored = Ledger(ledger.plan)
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert restored.state_dict() == ledger.state_dict()
    assert restored.check() == []
    assert train(restored) == [2, 4]
    assert restored.released(1) == 0
    finish(restored, 0, 1)
    assert train(restored) == [0, 1]
    assert (restored.released(1), restored.released(2)) == (0, 3)


@pytest.mark.parametrize(("share", "ahead"), [(None, 4), (0.0, 0), (0.5, 1), (1.0, 2), (2.0, 4)])
def test_over_provisioning_lets_in_a_share_of_a_step_more(share: float | None, ahead: int) -> None:
    ledger = make_ledger(over_provision=share)
    assert ledger.admitted == 2 + ahead
    finish(ledger, 0, 1)
    train(ledger)
    assert ledger.admitted == 4 + ahead


def test_what_is_unfinished_when_a_step_has_its_groups_is_kept_and_goes_on() -> None:
    ledger = make_ledger(order="arrival", over_provision=1.0)
    ledger.claim("w", free=8, version=0)
    finish(ledger, 2, 3)
    ledger.set_aside(sampled(0, 1, "abc"))
    ledger.leave("w")
    assert train(ledger) == [2, 3]
    work = {a.trajectory.key: a.trajectory for a in ledger.claim("v", free=99, version=1)}
    assert bytes(work[0, 1].tokens) == b"abc"


def run_with_long_tails(ledger: Ledger, *, slots: int) -> tuple[list[list[int]], dict[int, int]]:
    """Sample a token per slot and tick; every fifth prompt has answers twenty times as long.

    Return the ordinals of every step, and after how many steps each ordinal was let in.
    """
    taken: list[list[int]] = []
    let_in = dict.fromkeys(range(ledger.admitted), 0)
    running: dict[tuple[int, int], Trajectory] = {}
    ticks: dict[tuple[int, int], int] = {}
    while len(taken) < ledger.plan.steps:
        step = len(taken)
        for work in ledger.claim("w", free=slots - len(running), version=step):
            assert work.version <= step
            ordinal, sample = work.trajectory.key
            tokens = "a" * (60 if ordinal % 5 == 0 else 2) + "\n"
            running[ordinal, sample] = sampled(ordinal, sample, tokens, version=step)
        for key in list(running):
            ticks[key] = ticks.get(key, 0) + 1
            if ticks[key] == len(running[key].tokens):
                assert ledger.deliver(running.pop(key)) is DeliveryVerdict.ACCEPTED
        if ledger.batch(step) is not None:
            taken.append(train(ledger))
            let_in |= dict.fromkeys(range(len(let_in), ledger.admitted), len(taken))
    return taken, let_in


def test_over_a_long_run_long_answers_are_trained_as_often_as_they_are_let_in() -> None:
    ledger = make_ledger(
        steps=300, eta=3, most=70, order="arrival", claims="longest", over_provision=1.0
    )
    taken, let_in = run_with_long_tails(ledger, slots=6)
    trained_in = {ordinal: step for step, ordinals in enumerate(taken) for ordinal in ordinals}
    assert sorted(trained_in) == list(range(600))
    assert taken != [[2 * step, 2 * step + 1] for step in range(300)], "some were overtaken"
    assert max(trained_in[ordinal] - let_in[ordinal] for ordinal in let_in) <= 3 + 2
    assert ledger.staleness_max == 3
    for step in range(300):
        long_trained = sum(
            ordinal % 5 == 0 for ordinals in taken[: step + 1] for ordinal in ordinals
        )
        long_let_in = sum(o % 5 == 0 and after <= step for o, after in let_in.items())
        assert 0 <= long_let_in - long_trained <= 4


# -- budget and memory -----------------------------------------------------------------------


def test_a_spent_budget_leaves_only_what_the_next_step_waits_for_at_work() -> None:
    ledger = make_ledger(token_budget=6)
    ledger.claim("w", free=6, version=0)  # ordinals 0 to 2
    ledger.report({(0, 0): 2, (2, 0): 3})
    assert ledger.pressure is Pressure.NONE
    assert ledger.allowance(1) == 1
    ledger.report({(0, 0): 2, (2, 0): 4})
    assert ledger.pressure is Pressure.BUDGET
    assert ledger.allowance(1) is None
    assert ledger.beyond_budget("w") == {(2, 0), (2, 1)}
    ledger.set_aside(sampled(2, 0, "abcd"))
    ledger.abandon("w", [(2, 0), (2, 1)])
    assert ledger.claim("v", free=99, version=0) == []
    finish(ledger, 0, 1)
    train(ledger)
    work = ledger.claim("v", free=99, version=1)
    assert bytes(work[0].trajectory.tokens) == b"abcd"
    assert len(work) == 12
    assert ledger.counters.samples_set_aside == 1


def test_tokens_are_charged_once_and_those_sampled_again_are_charged_again() -> None:
    ledger = make_ledger(token_budget=100)
    ledger.claim("w", free=1, version=0)
    ledger.report({(0, 0): 2})
    ledger.report({(0, 0): 2})
    ledger.deliver(sampled(0, 0, "ab\n"))
    assert ledger.allowance(1) == 97
    ledger.claim("w", free=1, version=0)
    ledger.report({(0, 1): 5})
    ledger.lose("w")
    ledger.claim("v", free=1, version=0)  # from the beginning
    ledger.report({(0, 1): 4})
    assert ledger.allowance(1) == 88


def test_a_full_ledger_gives_out_only_what_the_next_step_waits_for() -> None:
    ledger = make_ledger(ledger_tokens=6)
    finish(ledger, 2)
    assert ledger.held_tokens == 6
    assert ledger.pressure is Pressure.MEMORY
    assert {a.trajectory.ordinal for a in ledger.claim("w", free=99, version=0)} == {0, 1}
    assert ledger.beyond_budget("w") == set(), "what is at work goes on"
    finish(ledger, 0, 1)
    train(ledger)
    assert ledger.pressure is Pressure.MEMORY
    finish(ledger, 3)
    train(ledger)
    assert ledger.pressure is Pressure.NONE


def test_a_budget_is_kept_in_a_full_ledger_too() -> None:
    ledger = make_ledger(token_budget=6, ledger_tokens=6)
    ledger.claim("w", free=6, version=0)
    ledger.deliver(sampled(0, 0, "abcde\n"))
    assert ledger.pressure is Pressure.MEMORY
    assert ledger.beyond_budget("w") == {(2, 0), (2, 1)}


def test_a_full_worker_gets_only_what_the_next_step_waits_for() -> None:
    ledger = make_ledger()
    work = ledger.claim("w", free=99, version=0, full=True)
    assert {a.trajectory.ordinal for a in work} == {0, 1}
    assert ledger.claim("w", free=99, version=0, full=True) == []


def test_a_budget_is_shared_and_renewed() -> None:
    budget = TokenBudget(limit=10)
    budget.charge(3)
    assert budget.share(2) == 4
    budget.charge(9)
    assert (budget.left, budget.share(2)) == (0, None)
    assert pressure(budget, held_tokens=0, most=None) is Pressure.BUDGET
    assert pressure(budget, held_tokens=5, most=5) is Pressure.MEMORY
    budget.renew()
    assert pressure(budget, held_tokens=4, most=5) is Pressure.NONE
    assert TokenBudget().share(3) is None


# -- long tails ------------------------------------------------------------------------------


def test_what_is_waited_for_comes_first_then_the_longest_then_by_number() -> None:
    ledger = make_ledger(claims="longest")
    ledger.set_aside(sampled(0, 0, "ab"))
    keys = [each.trajectory.key for each in ledger.claim("w", free=5, version=None)]
    assert keys == [(0, 1), (1, 0), (1, 1), (0, 0), (2, 0)]


def test_lengths_are_those_of_prompts_as_long_then_of_all_then_the_most() -> None:
    lengths = Lengths()
    assert lengths.expected(5, most=30) == 30
    lengths.note(5, 10)
    lengths.note(6, 20)
    lengths.note(100, 3)
    assert lengths.expected(4, most=30) == 15
    assert lengths.expected(1000, most=30) == 11
    assert lengths.expected(4, most=12) == 12
    again = Lengths(json.loads(json.dumps(lengths.state_dict())))
    assert again.state_dict() == lengths.state_dict()


def test_what_a_sample_still_needs_follows_its_groups_finished_ones() -> None:
    assert remaining(12.0, done=[], have=0, most=30) == 12
    assert remaining(12.0, done=[20, 28], have=5, most=30) == 15
    assert remaining(12.0, done=[], have=20, most=30) == 1
    assert remaining(90.0, done=[], have=0, most=30) == 30


def test_the_longest_are_claimed_first_within_what_the_same_step_waits_for() -> None:
    ledger = make_ledger(claims="longest")
    ledger.deliver(sampled(0, 0, "a\n"))
    ledger.deliver(sampled(1, 0, "abcdefghij\n"))
    ledger.deliver(sampled(4, 0, "a" * 30))
    ledger.recover(sampled(3, 0, "a" * 20))
    work = ledger.claim("w", free=99, version=0)
    assert [a.trajectory.key for a in work] == [
        *[(1, 1), (0, 1)],
        *[(2, 0), (2, 1), (3, 1), (3, 0)],
        *[(4, 1), (5, 0), (5, 1)],
    ]


def test_every_step_learns_the_lengths_of_its_samples() -> None:
    ledger = make_ledger(claims="longest")
    finish(ledger, 0, tokens="abcdefg\n")
    finish(ledger, 1, tokens="\n")
    train(ledger)
    assert ledger.state_dict()["lengths"] == {"2": [4, 18]}


# -- metrics and settings --------------------------------------------------------------------


def test_percentiles_are_values_that_occur() -> None:
    values = list(range(1, 21))
    assert [percentile(values, share) for share in (0.5, 0.95, 1.0)] == [10, 19, 20]
    assert percentile([7], 0.5) == 7
    assert percentile([], 0.5) == 0


def test_the_tail_of_a_step_is_told() -> None:
    tail = Tail()
    samples = [sampled(0, 0, "a\n"), sampled(0, 1, "abc\n")]
    tail.arrived((0, 0), now_s=10.0)
    tail.arrived((0, 1), now_s=12.0)
    tail.occupied("w", busy=6, slots=8, now_s=9.0)
    tail.occupied("w", busy=2, slots=8, now_s=10.0)
    tail.occupied("v", busy=8, slots=8, now_s=11.0)
    tail.gone("v", now_s=12.0)
    result = tail.step(samples, completes=1, carried_tokens=5, now_s=13.0)
    assert result == StepTail(
        step=1,
        length_p50_tokens=2,
        length_p95_tokens=4,
        length_max_tokens=4,
        waited_p50_s=1.0,
        waited_p95_s=3.0,
        waited_max_s=3.0,
        busy=0.5,
        working=1.0,
        carried_tokens=5,
    )
    assert tail.step([], completes=2, carried_tokens=0, now_s=14.0).busy == 0.25


def test_a_worker_works_while_one_of_its_slots_is_busy() -> None:
    tail = Tail()
    tail.occupied("w", busy=1, slots=8, now_s=0.0)
    tail.occupied("w", busy=0, slots=8, now_s=3.0)
    tail.occupied("v", busy=0, slots=8, now_s=3.0)
    assert tail.step([], completes=1, carried_tokens=0, now_s=4.0).working == 0.6


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"mode": Mode.FIXED_LAG, "scheduling": Scheduling(order=GroupOrder.ARRIVAL)},
            "order 'arrival'",
        ),
        ({"mode": Mode.SYNC, "scheduling": Scheduling(token_budget=9)}, "token_budget in mode"),
        ({"scheduling": Scheduling(over_provision=2.5)}, "over_provision is 2.5 steps"),
        ({"mode": Mode.SYNC, "scheduling": Scheduling(over_provision=0.5)}, "0 steps old at most"),
    ],
)
def test_what_a_mode_cannot_have_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        RLConfig(**settings)


@pytest.mark.parametrize(
    "wrong",
    [{"over_provision": -0.1}, {"token_budget": 0}, {"ledger_tokens": 0}, {"worker_tokens": -1}],
)
def test_limits_are_positive(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Scheduling(**wrong)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"order": "backwards"}, Scheduling)
