"""The ledger's rules, one sentence each."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import BatchPlan
from holdfast.adapters.rl.ledger.states import (
    TRANSITIONS,
    DeliveryVerdict,
    LedgerError,
    OrdinalEvent,
    OrdinalState,
)
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory, Turn, TurnLimits

LIMITS = TurnLimits(end=10, context=12, max_new_tokens=6)
PLAN = BatchPlan(groups=2, group=2, eta=1, steps=4, limits=LIMITS)


def prompt_of(ordinal: int) -> Tokens:
    return tuple(f"p{ordinal}>".encode())


def make_ledger(completed: int = 0) -> Ledger:
    ledger = Ledger(PLAN)
    ledger.resume(1, restored=0)
    ledger.admit(completed, prompt_of)
    return ledger


def sampled(
    ordinal: int,
    sample: int,
    *,
    tokens: Tokens = tuple(b"ab\n"),
    version: int | None = None,
    generation: int = 1,
) -> Trajectory:
    version = PLAN.version_of(ordinal) if version is None else version
    return Trajectory(
        ordinal=ordinal,
        sample=sample,
        prompt=prompt_of(ordinal),
        tokens=tokens,
        logprobs=(-0.5,) * len(tokens),
        stamps=(Stamp(generation=generation, version=version, count=len(tokens)),),
    )


def train_step(ledger: Ledger, step: int) -> None:
    for ordinal, sample in itertools.product(range(2 * step, 2 * step + 2), range(2)):
        ledger.deliver(sampled(ordinal, sample))
    ledger.train(step)
    ledger.admit(step + 1, prompt_of)


def test_each_policy_has_a_book_of_its_trained_tokens_that_is_restored() -> None:
    ledger = Ledger(PLAN, policies=("solver", "critic"))
    ledger.resume(1, restored=0)
    ledger.admit(0, prompt_of)
    for ordinal, sample in itertools.product(range(2), range(2)):
        first = sampled(ordinal, sample, tokens=tuple(b"a?b\n"))
        turn = Turn(end=1, observed=1, state="null", then=1)
        ledger.deliver(
            msgspec.structs.replace(
                first,
                logprobs=first.logprobs[1:],
                stamps=(Stamp(generation=1, version=0, count=3),),
                turns=(turn,),
            )
        )
    assert ledger.books.tokens == (0, 0), "nothing is trained yet"
    ledger.train(0)
    assert ledger.books.report() == {
        "solver": {"turns": 4, "tokens": 4},
        "critic": {"turns": 4, "tokens": 8},
    }
    state = json.loads(json.dumps(ledger.state_dict()))
    restored = Ledger(PLAN, policies=("solver", "critic"))
    restored.load_state_dict(state)
    assert restored.books.tokens == (4, 8)
    with pytest.raises(LedgerError, match=r"policies \['solver', 'critic'\].*keep names and order"):
        Ledger(PLAN, policies=("critic", "solver")).load_state_dict(state)


def test_only_ordinals_whose_policy_version_exists_are_admitted() -> None:
    ledger = make_ledger()
    assert ledger.counts()["pending"] == 4  # steps 0 and 1, both by version 0
    train_step(ledger, 0)
    counts = {state: count for state, count in ledger.counts().items() if count}
    assert counts == {"pending": 4, "trained": 2}
    work = ledger.claim("w", free=99, version=1)
    assert {a.trajectory.ordinal for a in work} == {4, 5}


def test_one_claim_is_of_one_version_and_the_earliest_ordinals() -> None:
    ledger = make_ledger()
    train_step(ledger, 0)
    work = ledger.claim("w", free=3, version=None)
    assert [a.trajectory.key for a in work] == [(2, 0), (2, 1), (3, 0)]
    assert {a.version for a in work} == {0}
    assert [a.trajectory.key for a in ledger.claim("v", free=9, version=None)] == [(3, 1)]
    assert {a.version for a in ledger.claim("v", free=9, version=None)} == {1}


def test_a_batch_is_complete_ordered_and_trained_once() -> None:
    ledger = make_ledger()
    for ordinal, sample in [(1, 1), (0, 1), (1, 0)]:
        assert ledger.deliver(sampled(ordinal, sample)) is DeliveryVerdict.ACCEPTED
    assert ledger.batch(0) is None
    ledger.deliver(sampled(0, 0))
    batch = ledger.batch(0)
    assert batch is not None
    assert [t.key for t in batch] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    ledger.train(0)
    with pytest.raises(LedgerError, match="step 0 offered for training, next is 1"):
        ledger.train(0)
    assert ledger.check() == []


def test_duplicates_are_refused_and_counted_and_a_differing_one_is_a_violation() -> None:
    ledger = make_ledger()
    ledger.deliver(sampled(0, 0))
    assert ledger.deliver(sampled(0, 0)) is DeliveryVerdict.DUPLICATE
    assert ledger.deliver(sampled(0, 0), again=True) is DeliveryVerdict.DUPLICATE
    assert (ledger.counters.duplicates_refused, ledger.counters.redelivered) == (1, 1)
    assert ledger.check() == []
    ledger.deliver(sampled(0, 0, tokens=tuple(b"zz\n")))
    assert ledger.check() == ["sample (0, 0) was delivered in two versions"]


def test_a_lost_workers_claims_go_to_another_with_the_tokens_of_its_log() -> None:
    ledger = make_ledger()
    ledger.claim("w", free=3, version=None)
    ledger.lose("w")
    ledger.recover(sampled(0, 0))
    ledger.recover(sampled(0, 1, tokens=tuple(b"ab")))
    work = ledger.claim("v", free=3, version=None)
    assert [(a.trajectory.key, a.trajectory.tokens) for a in work] == [
        ((0, 1), tuple(b"ab")),
        ((1, 0), ()),
        ((1, 1), ()),
    ]
    assert ledger.counters.tokens_recovered == 5


def test_workers_announce_what_they_hold_and_abandon_what_another_has() -> None:
    ledger = make_ledger()
    ledger.deliver(sampled(0, 1))
    assert ledger.hold("w", [(0, 0), (0, 1), (9, 0)]) == {(0, 1), (9, 0)}
    assert ledger.hold("v", [(0, 0)]) == {(0, 0)}
    assert ledger.claimed("w") == {(0, 0)}


def test_a_sample_of_a_version_that_was_rolled_back_is_abandoned() -> None:
    ledger = make_ledger()
    train_step(ledger, 0)
    assert ledger.hold("w", [(2, 0), (2, 1)], oldest={(2, 0): 1, (2, 1): 2}) == {(2, 1)}


def test_a_restored_ledger_has_what_was_delivered_and_what_ran_is_pending() -> None:
    ledger = make_ledger()
    train_step(ledger, 0)
    ledger.claim("w", free=2, version=None)
    ledger.deliver(sampled(2, 0))
    ledger.recover(sampled(3, 0, tokens=(120,)))
    restored = Ledger(PLAN)
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    restored.resume(2, restored=1)
    assert restored.counts()["running"] == 0
    assert restored.check() == []
    work = restored.claim("v", free=9, version=None)
    assert [(a.trajectory.key, a.trajectory.tokens) for a in work] == [
        ((2, 1), ()),
        ((3, 0), (120,)),
        ((3, 1), ()),
    ]
    assert restored.counters == ledger.counters


def test_samples_of_a_rolled_back_future_are_dropped() -> None:
    ledger = make_ledger()
    train_step(ledger, 0)
    ledger.resume(2, restored=1)
    ledger.admit(1, prompt_of)
    ahead = sampled(4, 0, version=2, generation=1)
    assert ledger.deliver(ahead) is DeliveryVerdict.ROLLED_BACK
    assert (
        ledger.recover(sampled(4, 0, tokens=tuple(b"a"), version=2, generation=1))
        is DeliveryVerdict.UNKNOWN
    )
    assert not ledger.current(generation=1, version=2)
    assert ledger.current(generation=1, version=1)
    assert ledger.current(generation=2, version=2)
    assert ledger.deliver(sampled(4, 0, generation=1)) is DeliveryVerdict.ACCEPTED


def test_a_job_that_is_started_again_counts_its_generations_anew() -> None:
    ledger = make_ledger()
    ledger.resume(2, restored=0)
    train_step(ledger, 0)
    ledger.resume(3, restored=1)
    train_step(ledger, 1)
    ledger.deliver(sampled(4, 0, generation=3))
    again = Ledger(PLAN)
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    again.resume(1, restored=2)
    assert again.cuts == {1: 2}
    assert again.current(generation=1, version=3), "the restores of the earlier start are no matter"
    assert all(again.valid(sample) for sample in again.samples())
    assert again.deliver(sampled(4, 1, generation=1)) is DeliveryVerdict.ACCEPTED
    again.resume(2, restored=2)
    assert not again.current(generation=1, version=3)
    assert all(again.valid(sample) for sample in again.samples())


def test_samples_of_another_version_than_the_lag_demands_are_a_violation() -> None:
    ledger = make_ledger()
    train_step(ledger, 0)
    train_step(ledger, 1)
    for ordinal, sample in itertools.product((4, 5), range(2)):
        ledger.deliver(sampled(ordinal, sample, version=2 if (ordinal, sample) == (4, 0) else 1))
    ledger.train(2)
    assert ledger.check() == ["sample (4, 0) of step 2 was sampled by versions [2], wanted 1"]
    assert ledger.staleness_max == 1


def test_a_prompt_without_room_for_an_answer_is_dropped_and_its_step_trains_without_it() -> None:
    ledger = Ledger(PLAN)
    ledger.admit(0, lambda ordinal: (120,) * (12 if ordinal == 1 else 3))
    assert ledger.counts()["dropped"] == 1
    assert {a.trajectory.ordinal for a in ledger.claim("w", free=99, version=None)} == {0, 2, 3}
    for sample in range(2):
        ledger.deliver(sampled(0, sample))
    batch = ledger.batch(0)
    assert batch is not None
    assert {t.ordinal for t in batch} == {0}
    ledger.train(0)
    assert ledger.check() == []


def test_a_state_of_another_job_is_refused() -> None:
    other = Ledger(BatchPlan(groups=3, group=2, eta=1, steps=4, limits=PLAN.limits))
    with pytest.raises(LedgerError, match="the saved ledger is of a job with"):
        other.load_state_dict(make_ledger().state_dict())


def test_weights_and_ledger_must_come_from_one_snapshot() -> None:
    with pytest.raises(LedgerError, match="resumes at step 3 with a ledger of 0 trained steps"):
        make_ledger().resume(2, restored=3)


def test_every_state_but_the_last_is_left_by_some_event_and_none_leaves_the_last() -> None:
    assert {state for state, _ in TRANSITIONS} == set(OrdinalState) - {OrdinalState.TRAINED}
    assert {event for _, event in TRANSITIONS} == set(OrdinalEvent)


def test_an_answer_is_over_at_its_end_token_at_its_longest_or_where_the_context_ends() -> None:
    limits = PLAN.limits
    assert limits.finished(sampled(0, 0, tokens=(97, 10)))
    assert limits.finished(sampled(0, 0, tokens=tuple(b"abcdef")))
    assert not limits.finished(sampled(0, 0, tokens=tuple(b"abcde")))
    assert limits.over(9, 3, 97)
