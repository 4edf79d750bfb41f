"""Steps pass over groups of equal rewards: the same ones whatever dies and whoever is faster."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from exploring import examples
from hypothesis import given, settings
from mutants.skipping import GROUPS, STEPS, WORKERS, Life, ordinals, plain_steps, plan_of, versions

from holdfast.adapters.rl.ledger.checker import StepChecker, observe
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.ckpt.errors import ArgumentError

EQUAL = st.sets(st.integers(0, 25), max_size=20)
LONG = st.sets(st.integers(0, 25), max_size=3)
SEEDS = st.integers(1, 2**32)
QUICK = settings(max_examples=examples(25), deadline=None)


@pytest.mark.parametrize("mode", [Mode.FIXED_LAG, Mode.SYNC, Mode.BOUNDED])
@QUICK
@given(
    eta=st.integers(0, 2), equal=EQUAL, long=LONG, seed=st.integers(1, 2**32), less=st.booleans()
)
def test_steps_train_the_next_groups_that_teach_something_whatever_dies(
    mode: Mode, eta: int, equal: set[int], long: set[int], seed: int, less: bool
) -> None:
    plan = plan_of(eta, mode, **({"over_provision": 0.0} if less else {}))
    life = Life(plan, equal=equal, long=long, seed=seed, trouble=0.05)
    trained = life.run()
    assert life.found == []
    assert ordinals(trained) == plain_steps(equal, long)
    last = trained[-1][-1].ordinal
    counts = life.ledger.counts()
    assert counts["skipped"] == len([o for o in equal - long if o < last])
    assert counts["dropped"] == len([o for o in long if o < last])
    assert life.ledger.counters.groups_skipped == counts["skipped"]
    assert life.ledger.admitted == last + 1, "nothing is left open"
    for step, batch in enumerate(trained):
        assert all(step - plan.eta <= v <= step for each in batch for v in each.versions)
    if plan.pinned:
        calm = Life(plan, equal=equal, long=long).run()
        assert versions(trained) == versions(calm), "by the same versions, so the same bits"


@pytest.mark.parametrize("mode", [Mode.FIXED_LAG, Mode.BOUNDED])
@pytest.mark.parametrize("eta", [0, 2])
def test_without_equal_groups_it_is_the_plain_job(mode: Mode, eta: int) -> None:
    plan = plan_of(eta, mode)
    trained = Life(plan, equal=()).run()
    assert ordinals(trained) == [[2 * step, 2 * step + 1] for step in range(STEPS)]
    if plan.pinned:
        wanted = [{o: frozenset({plan.version_of(o)}) for o in both} for both in ordinals(trained)]
        assert versions(trained) == wanted


@QUICK
@given(limit=st.integers(1, 4), eta=st.integers(0, 2), from_=st.integers(0, 8), seed=SEEDS)
def test_a_job_whose_groups_are_all_equal_stops_by_name(
    limit: int, eta: int, from_: int, seed: int
) -> None:
    plan = plan_of(eta, Mode.FIXED_LAG, limit=limit)
    told = set()
    for each in (seed, seed + 1):
        life = Life(plan, equal=range(from_, 999), seed=each, trouble=0.03)
        trained = life.run()
        assert len(trained) == from_ // GROUPS
        told.add(life.ledger.stuck)
        assert life.ledger.admitted <= from_ + GROUPS * (limit + eta + 2)
    (why,) = told
    assert why.startswith(f"step {from_ // GROUPS + 1} passed over {limit * GROUPS} groups")
    assert f"skip_equal={limit} allows" in why


def test_recorded_rewards_decide_after_a_restore_whatever_is_computed_then() -> None:
    life = Life(plan_of(1, Mode.FIXED_LAG), equal={0, 3}, seed=1)
    while life.ledger.batch(0) is None:
        for worker in WORKERS:
            life._claim(worker)
            life._deliver(worker)
    state, other = life.ledger.state_dict(), Ledger(life.plan, reward_of=lambda _: 7.0)
    assert state["rewards"]["0"] == [0.25, 0.25, 0.25]
    other.load_state_dict(json.loads(json.dumps(state)))
    other.admit(0, life._prompt)
    assert other.batch(0) == life.ledger.batch(0)
    assert other.takes() == life.ledger.takes()


PLANTED: Mapping[str, tuple[dict[str, Any], str]] = {
    "a group that teaches is skipped": (
        {"rewards": {0: (0.0, 1.0, 0.0)}},
        "skips ordinal 0, whose",
    ),
    "without its rewards": ({"rewards": {0: ()}}, r"skips ordinal 0, whose rewards are \[\]"),
    "a group that teaches nothing is trained": (
        {"rewards": {1: (0.5, 0.5, 0.5)}},
        r"trains ordinal 1, whose rewards are \[0.5, 0.5, 0.5\]",
    ),
    "what is skipped is trained": ({"skipped": frozenset({0, 1})}, "skipped ordinal 1 is trained"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_checker_finds_what_is_planted(name: str) -> None:
    changes, said = PLANTED[name]
    life = Life(plan_of(1, Mode.FIXED_LAG), equal={0})
    while (batch := life.ledger.batch(0)) is None:
        for worker in WORKERS:
            life._claim(worker)
            life._deliver(worker)
    seen = observe(life.ledger, 0, batch)
    assert seen.skipped == {0}
    assert StepChecker().check(seen) == []
    rewards = {**seen.rewards, **changes.get("rewards", {})}
    found = StepChecker().check(msgspec.structs.replace(seen, **{**changes, "rewards": rewards}))
    assert any(re.search(said, what) for what in found), found


def test_groups_are_passed_over_in_order_only_and_by_rewards_only() -> None:
    with pytest.raises(ArgumentError, match="choose order 'prompt'"):
        plan_of(1, Mode.BOUNDED, order=GroupOrder.ARRIVAL)
    with pytest.raises(ArgumentError, match="set it to None"):
        Ledger(plan_of(1, Mode.BOUNDED))
    with pytest.raises(ArgumentError, match="give 1 or more steps, or None"):
        plan_of(1, Mode.BOUNDED, limit=0)


def test_a_plan_of_before_is_read_as_one_that_skips_nothing() -> None:
    state = msgspec.to_builtins(plan_of(1, Mode.BOUNDED))
    del state["scheduling"]["skip_equal"]
    assert not msgspec.convert(state, BatchPlan).skips
