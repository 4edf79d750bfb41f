"""Under losses, deferrals, delays and overtaking, each ordinal is trained once and in time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

import hypothesis.strategies as st
from exploring import examples
from hypothesis import settings
from hypothesis.stateful import precondition, rule
from ledger_machine import END, WORKERS, LedgerMachine, plan_of

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import BatchPlan
from holdfast.adapters.rl.ledger.replay import ReplayConfig
from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory


class SchedulingMachine(LedgerMachine):
    """Workers that deliver finished samples and report running ones at every meeting."""

    plan: ClassVar[BatchPlan] = plan_of(order=GroupOrder.ARRIVAL)

    def meet(self, worker: str) -> None:
        self.exchange(worker)

    def _oldest(self, worker: str) -> Mapping[SampleId, int]:
        weights = self.weights[worker]
        return {
            key: trajectory.oldest if trajectory.oldest is not None else weights[1]
            for key, trajectory in self.running[worker].items()
            if weights is not None
        }

    @rule(worker=WORKERS, free=st.integers(1, 6), full=st.booleans())
    def claim(self, worker: str, free: int, full: bool) -> None:
        self.exchange(worker)
        weights, awaited = self.weights[worker], self.ledger.awaited()
        pressed = self.ledger.pressure != "none"
        version = weights[1] if weights else None
        work = self.ledger.claim(worker, free=free, version=version, full=full)
        needed = max((each.version for each in work), default=0)
        assert needed <= len(self.trained), "the version is there"
        if work and (weights is None or weights[1] < needed):
            self.weights[worker] = (self.generation, needed)
        for each in work:
            assert not (full or pressed) or each.trajectory.ordinal in awaited
            self.running[worker][each.trajectory.key] = each.trajectory

    @rule(worker=WORKERS)
    def busy(self, worker: str) -> None:
        """A stretch without trouble."""
        self.claim(worker, 4, False)
        for token in (97, 98, END):
            self.sample(worker, token, 3)
        self.exchange(worker)
        if len(self.trained) < self.plan.steps:
            self.train()

    @rule(worker=WORKERS)
    def exchange(self, worker: str) -> None:
        """Deliver finished samples, report running ones, set aside those beyond the budget."""
        again = worker in self.late
        self.late.discard(worker)
        for finished in self.finished[worker].values():
            self.ledger.deliver(finished, again=again)
        weights, running = self.weights[worker], self.running[worker]
        if weights and not self.ledger.current(generation=weights[0], version=weights[1]):
            for left in running.values():
                self.ledger.recover(left)
            running.clear()
            self.weights[worker] = None
        keys = set(running)
        for key in self.ledger.hold(worker, keys, oldest=self._oldest(worker)):
            del running[key]
        self.ledger.abandon(worker, self.ledger.claimed(worker) - keys)
        self.ledger.report({key: len(each.tokens) for key, each in running.items()})
        beyond = self.ledger.beyond_budget(worker)
        assert beyond <= running.keys()
        for key in beyond:
            self.ledger.set_aside(running.pop(key))
        self.ledger.abandon(worker, beyond)

    @rule(worker=WORKERS)
    def leave(self, worker: str) -> None:
        """It hands over its samples and leaves."""
        self.exchange(worker)
        for trajectory in self.running[worker].values():
            self.ledger.recover(trajectory)
        self.ledger.leave(worker)
        assert not self.ledger.claimed(worker)
        self.forget(worker)

    @precondition(lambda self: len(self.trained) < self.plan.steps)
    @rule()
    def train(self) -> None:
        step = len(self.trained)
        batch = self.ledger.batch(step)
        if batch is None:
            return
        for worker in "uvw":  # what is settled stays so, whatever is given out now
            self.ledger.claim(f"other {worker}", free=1, version=None)
            self.ledger.lose(f"other {worker}")
        assert self.ledger.batch(step) == batch
        fresh = batch[: self.plan.fresh * self.plan.group]
        self._check_reused(step, batch[len(fresh) :])
        ordinals = sorted({each.ordinal for each in fresh})
        assert len(ordinals) == self.plan.fresh
        assert [each.key for each in fresh] == [
            (ordinal, sample) for ordinal in ordinals for sample in range(self.plan.group)
        ]
        if not self.plan.by_arrival:
            assert ordinals == list(range(step * self.plan.fresh, (step + 1) * self.plan.fresh))
        for trajectory in fresh:
            assert self.ledger.valid(trajectory)
            assert all(step - self.plan.eta <= v <= step for v in trajectory.versions)
        self.ledger.train(step, [float(len(each.tokens)) for each in batch])
        assert self.ledger.taken(step) == tuple(ordinals)
        self.trained.append(fresh)
        self.snapshot()
        self._release()

    def _check_reused(self, step: int, reused: list[Trajectory]) -> None:
        """They are whole groups of the last steps, not too many, the same after a restore."""
        config, plan = self.plan.replay, self.plan
        first = {each.ordinal: s for s, batch in enumerate(self.trained) for each in batch}
        groups = [reused[at : at + plan.group] for at in range(0, len(reused), plan.group)]
        assert len({each[0].ordinal for each in groups}) == len(groups)
        assert len(groups) <= config.reused(plan.groups)
        for each in groups:
            taken = self.trained[first[each[0].ordinal]]
            assert each == [sample for sample in taken if sample.ordinal == each[0].ordinal]
            assert 0 < step - first[each[0].ordinal] <= config.max_age
        again = Ledger(plan)
        again.load_state_dict(json.loads(json.dumps(self.ledger.state_dict())))
        samples = again.batch(step)
        assert samples is not None
        assert samples[len(samples) - len(reused) :] == reused or not reused

    def _release(self) -> None:
        protected = max(0, len(self.trained) - 2)
        released = self.ledger.released(protected)
        kept = {each.ordinal for batch in self.trained[:protected] for each in batch}
        assert set(range(released)) <= kept
        for worker, finished in self.finished.items():
            self.finished[worker] = {
                key: each for key, each in finished.items() if key[0] >= released
            }


class TightMachine(SchedulingMachine):
    """Half a step ahead, few tokens per step, and little memory."""

    plan = plan_of(
        order=GroupOrder.ARRIVAL,
        claims="longest",
        over_provision=0.5,
        token_budget=6,
        ledger_tokens=10,
    )


class InOrderMachine(SchedulingMachine):
    """The steps take the prompts in order, within limits as well."""

    plan = plan_of(claims="longest", token_budget=5, ledger_tokens=8)


class ReplayMachine(SchedulingMachine):
    """Half of every step are groups trained before."""

    plan = plan_of(
        ReplayConfig(policy="prioritized", share=0.5, max_age=2), order=GroupOrder.ARRIVAL
    )


QUICK = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
for machine in (SchedulingMachine, TightMachine, InOrderMachine, ReplayMachine):
    machine.TestCase.settings = QUICK
TestByArrival = SchedulingMachine.TestCase
TestTight = TightMachine.TestCase
TestInOrder = InOrderMachine.TestCase
TestReplay = ReplayMachine.TestCase


def test_no_worker_gets_a_version_that_a_restore_took_back() -> None:
    state = ReplayMachine()
    state.busy(worker="u")
    state.renew(worker="u")
    state.sample(worker="u", token=97, count=1)
    state.leave(worker="u")
    state.claim(worker="u", free=1, full=False)
    state.restore(back=1, late=set(), rush=False)
    state.busy(worker="u")
    state.holds()
    state.teardown()
