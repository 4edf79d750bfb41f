"""Work is given out in the order that the plain rules give, whatever happened before."""

from __future__ import annotations

import json
import random
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from doubles.plain_claims import PlainCandidate, plain_order, urgency
from exploring import examples
from hypothesis import given, settings

from holdfast.adapters.rl.ledger.budget import Pressure
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.ledger.states import OrdinalState
from holdfast.adapters.rl.ledger.taking import ByReward
from holdfast.adapters.rl.ledger.work.by_arrival import ByArrival
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import SampleId, Stamp, Trajectory, TurnLimits

END, CONTEXT, STEPS = 10, 12, 6
WORKERS = ("u", "v", "w")
PLANS: dict[str, dict[str, Any]] = {
    "pinned": {},
    "pinned, longest first": {"claims": "longest"},
    "in order": {"mode": Mode.BOUNDED, "token_budget": 9},
    "by arrival": {"mode": Mode.BOUNDED, "order": GroupOrder.ARRIVAL, "token_budget": 9},
    "by arrival, longest first": {
        "mode": Mode.BOUNDED,
        "order": GroupOrder.ARRIVAL,
        "claims": "longest",
        "ledger_tokens": 30,
    },
    "by reward": {"skip_equal": 50},
    "by reward, longest first": {"skip_equal": 50, "claims": "longest"},
}


def plan_of(mode: Mode = Mode.FIXED_LAG, **scheduling: Any) -> BatchPlan:
    limits = TurnLimits(end=END, context=CONTEXT, max_new_tokens=6)
    return BatchPlan(
        groups=3,
        group=2,
        eta=2,
        steps=STEPS,
        limits=limits,
        mode=mode,
        scheduling=Scheduling(**scheduling),
    )


def prompt_of(ordinal: int) -> Tokens:
    return (1,) * (CONTEXT if ordinal == 7 else 1 + ordinal % 5)


def reward_of(sample: Trajectory) -> float:
    return 0.0 if sample.ordinal % 3 == 0 else float(sample.sample)


def plain_urgency(ledger: Ledger) -> dict[int, int]:
    """Return how many steps can do without each incomplete group, by looking at all of them."""
    taking = ledger._taking
    open_, done, step = taking._oldest, taking._complete, taking.step
    if isinstance(taking, ByArrival):
        settled = taking._settled
        left = [each for each in taking._open() if each.ordinal not in settled]
        return urgency(left, step=step + bool(settled), groups=taking.groups)
    if isinstance(taking, ByReward):
        wanted = sorted(open_.keys() - set(taking._skipped))
        return {o: at // taking.groups for at, o in enumerate(wanted) if o not in done}
    return {o: o // taking.groups - step for o in sorted(open_) if o not in done}


def plain_claims(ledger: Ledger, *, free: int, version: int | None, full: bool) -> list[SampleId]:
    """Return the samples that are due, by sorting all that wait."""
    restricted = full or ledger.pressure is not Pressure.NONE
    longest = ledger.plan.scheduling.claims == "longest"
    found: list[SampleId] = []
    for each in plain_order(
        PlainCandidate(
            key=(ordinal, sample),
            urgency=steps,
            remaining=ledger._remaining(ledger._groups[ordinal], sample) if longest else 0.0,
        )
        for ordinal, steps in plain_urgency(ledger).items()
        if not (restricted and steps)
        for sample in ledger._groups[ordinal].missing
    ):
        wanted = ledger._taking.begin(each.key[0], None) if ledger.plan.pinned else None
        if len(found) < free and (version is None or wanted in (None, version)):
            version = wanted if ledger.plan.pinned else version
            found.append(each.key)
    return found


class Job:
    """A ledger with three workers, everything at random from a seed."""

    def __init__(self, plan: BatchPlan, seed: int) -> None:
        self.draw, self.plan, self.generation = random.Random(seed), plan, 1
        self.ledger = Ledger(plan, reward_of=reward_of)
        self.ledger.resume(1, restored=0)
        self.ledger.admit(0, prompt_of)
        self.running: dict[str, dict[SampleId, Trajectory]] = {name: {} for name in WORKERS}

    def turn(self) -> None:
        actions = (
            [self.claim] * 4 + [self.sample] * 6 + [self.train] * 3 + [self.lose, self.restore]
        )
        self.draw.choice(actions)(self.draw.choice(WORKERS))
        self.same()

    def same(self) -> None:
        """Require that all that is kept beside the groups is the same as a look at all of them."""
        ledger, groups = self.ledger, self.ledger._groups
        assert ledger.check() == []
        assert ledger.held_tokens == sum(group.tokens for group in groups.values())
        assert ledger.awaited() == {o for o, n in plain_urgency(ledger).items() if n == 0}
        for worker in WORKERS:
            assert ledger.claimed(worker) == {
                (ordinal, sample)
                for ordinal, group in groups.items()
                for sample, holder in group.claims.items()
                if holder == worker
            }
            assert ledger.beyond_budget(worker) <= ledger.claimed(worker)

    def claim(self, worker: str) -> None:
        free, full = self.draw.randint(0, 6), self.draw.random() < 0.2
        version = self.draw.choice([None, None, *range(self.ledger.trained_steps + 1)])
        wanted = plain_claims(self.ledger, free=free, version=version, full=full)
        work = self.ledger.claim(worker, free=free, version=version, full=full)
        assert [each.trajectory.key for each in work] == wanted
        self.running[worker] |= {each.trajectory.key: each.trajectory for each in work}

    def sample(self, worker: str) -> None:
        """Deliver, set aside, or let go of what a worker has."""
        for key in self.draw.sample(
            sorted(self.running[worker]), len(self.running[worker]) * 2 // 3
        ):
            trajectory = self._grown(self.running[worker].pop(key))
            if self.plan.limits.finished(trajectory):
                self.ledger.deliver(trajectory)
            else:
                self.ledger.set_aside(trajectory)
        self.ledger.abandon(worker, self.ledger.claimed(worker) - self.running[worker].keys())

    def _grown(self, trajectory: Trajectory) -> Trajectory:
        version = self.ledger.oldest(trajectory.ordinal) if self.plan.pinned else None
        stamp = Stamp(
            generation=self.generation,
            version=self.ledger.trained_steps if version is None else version,
            count=1,
        )
        return msgspec.structs.replace(
            trajectory,
            tokens=(*trajectory.tokens, self.draw.choice([END, END, 65])),
            logprobs=(*trajectory.logprobs, -1.0),
            stamps=(*trajectory.stamps, stamp),
        )

    def lose(self, worker: str) -> None:
        self.ledger.lose(worker)
        self.running[worker].clear()

    def train(self, _worker: str) -> None:
        step = self.ledger.trained_steps
        if step < STEPS and self.ledger.batch(step) is not None:
            self.ledger.train(step)
            self.ledger.admit(step + 1, prompt_of)

    def restore(self, _worker: str) -> None:
        if self.draw.random() < 0.7:
            return
        state = json.loads(json.dumps(self.ledger.state_dict()))
        self.ledger = Ledger(self.plan, reward_of=reward_of)
        self.ledger.load_state_dict(state)
        assert json.loads(json.dumps(self.ledger.state_dict())) == state
        self.generation += 1
        self.ledger.resume(self.generation, restored=self.ledger.trained_steps)
        self.ledger.admit(self.ledger.trained_steps, prompt_of)
        for running in self.running.values():
            running.clear()


@pytest.mark.parametrize("kind", PLANS)
@settings(max_examples=examples(10), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_each_claim_gets_what_a_look_at_all_samples_would_give(kind: str, seed: int) -> None:
    job = Job(plan_of(**PLANS[kind]), seed)
    for _ in range(200):
        job.turn()


def test_a_worker_keeps_its_version_though_others_wait_for_all_versions() -> None:
    ledger = Ledger(plan_of())
    ledger.resume(1, restored=0)
    ledger.admit(0, prompt_of)
    for step in range(3):
        work = ledger.claim("u", free=6, version=None)
        for each in work:
            stamp = Stamp(generation=1, version=0, count=1)
            done = msgspec.structs.replace(
                each.trajectory, tokens=(END,), logprobs=(-1.0,), stamps=(stamp,)
            )
            ledger.deliver(done)
        assert ledger.batch(step) is not None
        ledger.train(step)
        ledger.admit(step + 1, prompt_of)
    waiting = [o for o, each in ledger.states().items() if each is OrdinalState.PENDING]
    assert {*map(ledger.oldest, waiting)} == {1, 2, 3}
    assert {each.version for each in ledger.claim("v", free=99, version=2)} == {2}
    assert {each.version for each in ledger.claim("w", free=99, version=None)} == {1}
    assert ledger.claim("w", free=99, version=2) == []
