"""Samples continued under new weights are trained once, never by a version too old or undone."""

from __future__ import annotations

import hypothesis.strategies as st
from exploring import examples
from hypothesis import settings
from hypothesis.stateful import precondition, rule
from ledger_machine import END, WORKERS, LedgerMachine, plan_of

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.states import DeliveryVerdict
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory

PLAN = plan_of()


class BoundedMachine(LedgerMachine):
    """Workers that report their samples once to every leader, and deliver at any time."""

    plan = PLAN

    def meet(self, worker: str) -> None:
        self.announce(worker)

    @rule(worker=WORKERS, free=st.integers(1, 6))
    def claim(self, worker: str, free: int) -> None:
        self.announce(worker)
        weights = self.weights[worker]
        work = self.ledger.claim(worker, free=free, version=weights[1] if weights else None)
        oldest = max((each.version for each in work), default=0)
        if work and (weights is None or weights[1] < oldest):
            self.weights[worker] = (self.generation, oldest)
        for each in work:
            self.running[worker][each.trajectory.key] = each.trajectory

    @rule(worker=WORKERS)
    def busy(self, worker: str) -> None:
        """A stretch without trouble."""
        self.claim(worker, 4)
        for token in (97, 98, END):
            self.sample(worker, token, 3)
        self.deliver(worker, False)
        if len(self.trained) < PLAN.steps:
            self.train()

    @rule(worker=WORKERS, again=st.booleans())
    def deliver(self, worker: str, again: bool) -> None:
        self.announce(worker)
        for finished in self.finished[worker].values():
            self.ledger.deliver(finished, again=again)

    @precondition(lambda self: len(self.trained) < PLAN.steps)
    @rule()
    def train(self) -> None:
        step = len(self.trained)
        batch = self.ledger.batch(step)
        if batch is None:
            return
        assert [t.key for t in batch] == [
            (ordinal, sample)
            for ordinal in range(step * PLAN.groups, (step + 1) * PLAN.groups)
            for sample in range(PLAN.group)
        ]
        for trajectory in batch:
            assert self.ledger.valid(trajectory)
            assert all(step - PLAN.eta <= v <= step for v in trajectory.versions)
        self.ledger.train(step)
        self.trained.append(batch)
        self.snapshot()

    @rule(worker=WORKERS)
    def announce(self, worker: str) -> None:
        """A worker reports its samples to a new leader, and drops those that may not continue."""
        if worker not in self.late:
            return
        self.late.remove(worker)
        for finished in self.finished[worker].values():
            self.ledger.deliver(finished, again=True)
        weights = self.weights[worker]
        if weights and not self.ledger.current(generation=weights[0], version=weights[1]):
            for left in self.running[worker].values():
                self.ledger.recover(left)
            self.running[worker], self.weights[worker] = {}, None
        for key in self.ledger.hold(worker, set(self.running[worker])):
            del self.running[worker][key]


BoundedMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestBoundedLedger = BoundedMachine.TestCase


def test_what_was_sampled_before_a_rollback_is_kept() -> None:
    ledger = Ledger(PLAN)
    ledger.resume(1, restored=0)
    ledger.admit(0, lambda ordinal: (120, 62))
    stamps = tuple(Stamp(generation=1, version=version, count=1) for version in (0, 1))
    whole = Trajectory(
        ordinal=0,
        sample=0,
        prompt=(120, 62),
        tokens=(97, END),
        logprobs=(-1.0, -2.0),
        stamps=stamps,
    )
    ledger.resume(2, restored=0)  # version 1 of generation 1 never was
    assert ledger.deliver(whole) is DeliveryVerdict.ROLLED_BACK
    (first, *_) = ledger.claim("u", free=9, version=None)
    assert first.trajectory == whole.first(1)
    assert (ledger.counters.rolled_back, ledger.counters.tokens_recovered) == (1, 1)
