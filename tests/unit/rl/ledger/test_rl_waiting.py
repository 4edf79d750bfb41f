"""Giving out work looks at the samples that it gives, however many are open."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from holdfast.adapters.rl.ledger.group import Group
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.samples.trajectory import Stamp, TurnLimits

GROUPS, GROUP = 4, 2
PLANS = {
    "pinned": (Mode.FIXED_LAG, Scheduling()),
    "pinned, longest first": (Mode.FIXED_LAG, Scheduling(claims="longest")),
    "by arrival": (Mode.BOUNDED, Scheduling(order=GroupOrder.ARRIVAL)),
    "by arrival, longest first": (
        Mode.BOUNDED,
        Scheduling(order=GroupOrder.ARRIVAL, claims="longest"),
    ),
    "by reward": (Mode.FIXED_LAG, Scheduling(skip_equal=4)),
}


def make_ledger(kind: str, *, eta: int) -> Ledger:
    mode, scheduling = PLANS[kind]
    plan = BatchPlan(
        groups=GROUPS,
        group=GROUP,
        eta=eta,
        steps=1000,
        limits=TurnLimits(end=1, context=40, max_new_tokens=6),
        mode=mode,
        scheduling=scheduling,
    )
    ledger = Ledger(plan, reward_of=lambda sample: float(sample.sample))
    ledger.resume(1, restored=0)
    ledger.admit(0, lambda ordinal: (7,) * (1 + ordinal % 9))
    return ledger


@pytest.mark.parametrize("kind", PLANS)
def test_a_claim_looks_at_few_groups(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    real = Group.missing.fget
    assert real is not None

    def missing(group: Group) -> Sequence[int]:
        looked.append(group.ordinal)
        found: Sequence[int] = real(group)
        return found

    monkeypatch.setattr(Group, "missing", property(missing))
    ledger = make_ledger(kind, eta=100)
    ledger.claim("first", free=1, version=None)  # sorts all
    assert len(ledger.states()) == 101 * GROUPS
    for turn in range(8):
        looked.clear()
        work = ledger.claim(f"w{turn}", free=4, version=None)
        assert len(work) == 4
        assert len(looked) <= 3 * len(work)
        looked.clear()
        ledger.lose(f"w{turn}")
        assert len(looked) <= 2 * len(work)


@pytest.mark.parametrize("kind", PLANS)
def test_order_takes_no_memory_for_work_that_is_given_out_and_lost_again(kind: str) -> None:
    ledger = make_ledger(kind, eta=2)
    found = [each.trajectory.key for each in ledger.claim("w", free=5, version=None)]
    for _ in range(500):
        ledger.lose("w")
        work = ledger.claim("w", free=5, version=None)
        assert [each.trajectory.key for each in work] == found
    waiting = vars(ledger._groups.waiting)
    entries = [*waiting.get("_heaps", {}).values(), waiting.get("_begun", ())]
    assert sum(map(len, entries)) < 200


def test_samples_of_a_group_hold_one_prompt() -> None:
    ledger = make_ledger("pinned", eta=1)
    for each in ledger.claim("w", free=GROUP, version=None):
        stamp = Stamp(generation=1, version=0, count=2)
        done = msgspec.structs.replace(
            each.trajectory,
            prompt=(*each.trajectory.prompt,),
            tokens=(5, 1),
            logprobs=(-1.0, -1.0),
            stamps=(stamp,),
        )
        ledger.deliver(done)
        assert done in ledger.samples()
    assert {id(each.prompt) for each in ledger.samples()} == {id(ledger.prompt(0))}
