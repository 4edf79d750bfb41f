"""The ledger and its checker stay as small as they were, over any number of steps and restores."""

from __future__ import annotations

import itertools
import json
import random

import msgspec
import pytest
from doubles.sizes import deep_bytes
from hypothesis import given
from hypothesis import strategies as st

from holdfast.adapters.rl.ledger.checker import StepChecker, observe
from holdfast.adapters.rl.ledger.cuts import GenerationCuts
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.ledger.replay import ReplayConfig
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory, TurnLimits

GROUPS, GROUP, ETA = 2, 2, 2
LIMITS = TurnLimits(end=10, context=40, max_new_tokens=6)
PLANS = {
    "in order": BatchPlan(groups=GROUPS, group=GROUP, eta=ETA, steps=10**7, limits=LIMITS),
    "by arrival, with replay": BatchPlan(
        groups=GROUPS,
        group=GROUP,
        eta=ETA,
        steps=10**7,
        limits=LIMITS,
        mode=Mode.BOUNDED,
        scheduling=Scheduling(order=GroupOrder.ARRIVAL),
        replay=ReplayConfig(policy="recent", share=0.5, capacity=8),
    ),
}
SLACK_BYTES = 2048
"""Numbers with more digits, and one step's samples more or less."""


def prompt_of(ordinal: int) -> Tokens:
    return tuple(f"{ordinal:09d}>".encode())


class LongJob:
    """A trainer with one sampler, restored from its newest snapshot once in ``restored_every``."""

    def __init__(self, plan: BatchPlan, *, restored_every: int, seed: int = 0) -> None:
        self.plan, self._every, self._random = plan, restored_every, random.Random(seed)
        self.generation = 0
        self.ledger, self.checker = Ledger(plan), StepChecker()
        self._begin()

    def _begin(self) -> None:
        self.generation += 1
        self.ledger.resume(self.generation, restored=self.ledger.trained_steps)
        self.ledger.admit(self.ledger.trained_steps, prompt_of)

    def restore(self) -> None:
        """Begin another generation from a snapshot of now, as another process does."""
        kept = json.loads(json.dumps([self.ledger.state_dict(), self.checker.state_dict()]))
        self.ledger, self.checker = Ledger(self.plan), StepChecker()
        self.ledger.load_state_dict(kept[0])
        self.checker.load_state_dict(kept[1])
        self._begin()

    def step(self) -> None:
        """Sample and train one step; now and then a worker is lost, or a sample is of no use."""
        ledger, number = self.ledger, self.ledger.trained_steps
        if number % self._every == self._every - 1 and self._random.random() < 0.9:
            self.restore()
            ledger = self.ledger
        while (batch := ledger.batch(number)) is None:
            worker = f"w{self.generation}-{number}"
            for work in ledger.claim(worker, free=GROUPS * GROUP, version=None):
                stamp = Stamp(generation=self.generation, version=work.version, count=3)
                ledger.deliver(answered(work.trajectory, stamp))
            if self._random.random() < 0.1:
                ledger.lose(worker)
        assert self.checker.check(observe(ledger, number, batch)) == []
        ledger.train(number, [0.5] * len(batch))
        ledger.admit(number + 1, prompt_of)
        ledger.released(number)

    def sizes(self) -> tuple[int, int]:
        """Return the bytes in memory, and those of the tracked state."""
        state = [self.ledger.state_dict(), self.checker.state_dict()]
        return deep_bytes([self.ledger, self.checker]), len(json.dumps(state))


def answered(trajectory: Trajectory, stamp: Stamp) -> Trajectory:
    return msgspec.structs.replace(
        trajectory, tokens=tuple(b"ab\n"), logprobs=(-0.5, -1.0, -0.25), stamps=(stamp,)
    )


def check_flat(job: LongJob, *, steps: int, samples: int = 100) -> None:
    """Run a job; its sizes in the last quarter must be those of the second."""
    sizes = []
    for _ in range(samples):
        for _ in range(steps // samples):
            job.step()
        sizes.append(job.sizes())
    for early, late in zip(_most(sizes, 1), _most(sizes, 3), strict=True):
        assert late <= early + SLACK_BYTES


def _most(sizes: list[tuple[int, int]], quarter: int) -> list[int]:
    per_quarter = len(sizes) // 4
    part = sizes[quarter * per_quarter : (quarter + 1) * per_quarter]
    return [max(each) for each in zip(*part, strict=True)]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_ledger_does_not_grow_with_steps_and_restores(plan: BatchPlan) -> None:
    job = LongJob(plan, restored_every=3)
    check_flat(job, steps=1_200, samples=40)
    assert job.generation > 300


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_ledger_does_not_grow_in_a_million_prompts_and_ten_thousand_restores(
    plan: BatchPlan,
) -> None:
    job = LongJob(plan, restored_every=40)
    check_flat(job, steps=500_000)
    assert job.ledger.admitted >= 500_000
    assert job.generation > 10_000


CUTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=9)
"""For each generation, the steps that it trained and how far back the next one begins."""


@given(cuts=CUTS, eta=st.integers(0, 3))
def test_the_cuts_that_are_kept_say_the_same_of_every_token_that_may_be_trained(
    cuts: list[tuple[int, int]], eta: int
) -> None:
    everything, snapshots, step = dict[int, int](), {0: dict[int, int]()}, 0
    for generation, (trained, back) in enumerate(cuts, start=1):
        kept = GenerationCuts(snapshots[step])
        kept.begin(generation, restored=step, oldest=max(0, step - eta))
        everything[generation] = step
        assert len(kept.steps) <= eta + 2
        for reached in range(step, step + trained + 1):
            snapshots[reached] = kept.steps
        for at, version in itertools.product(everything, range(max(0, step - eta), step + 9)):
            valid = all(version <= cut for later, cut in everything.items() if later > at)
            assert kept.current(generation=at, version=version) is valid
        step = max(0, step + trained - back)


def test_a_job_that_goes_on_in_spite_of_violations_keeps_the_first_ones() -> None:
    ledger = Ledger(PLANS["in order"])
    ledger.resume(1, restored=0)
    for step in range(200):
        ledger.admit(step, prompt_of)
        while ledger.batch(step) is None:
            for work in ledger.claim("w", free=GROUPS * GROUP, version=None):
                stamp = Stamp(generation=1, version=work.version + 1, count=3)
                ledger.deliver(answered(work.trajectory, stamp))
        ledger.train(step)
    found = ledger.check()
    assert "of step 0 was sampled by versions [1], wanted 0" in found[0]
    assert len(found) == 100
