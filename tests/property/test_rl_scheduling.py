"""Whatever is lost, set aside, held back, overtaken: each ordinal once, in time, no standstill."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapters.rl.ledger import BatchPlan, Ledger, Mode
from adapters.rl.order import Order
from adapters.rl.replay import ReplayConfig
from adapters.rl.scheduling import Scheduling
from adapters.rl.trajectory import Limits, SampleId, Stamp, Trajectory, extend_stamps

END = 10
WORKERS = st.sampled_from(["u", "v", "w"])
TOKENS = st.sampled_from([END, 97, 98, 99])
STANDSTILL = 200
Weights = tuple[int, int]


def plan_of(replay: ReplayConfig | None = None, **scheduling: Any) -> BatchPlan:
    return BatchPlan(
        groups=2,
        group=2,
        eta=2,
        steps=6,
        limits=Limits(end=END, context=10, max_new_tokens=4),
        mode=Mode.BOUNDED,
        scheduling=Scheduling(**scheduling),
        replay=replay or ReplayConfig(),
    )


class SchedulingMachine(RuleBasedStateMachine):
    """A trainer that is restored now and then, and three workers that renew weights at will."""

    plan: ClassVar[BatchPlan] = plan_of(order=Order.ARRIVAL)

    def __init__(self) -> None:
        super().__init__()
        self.generation = 1
        self.ledger = Ledger(self.plan)
        self.ledger.resume(1, restored=0)
        self.weights: dict[str, Weights | None] = dict.fromkeys("uvw")
        self.running: dict[str, dict[SampleId, Trajectory]] = {"u": {}, "v": {}, "w": {}}
        self.held: dict[str, dict[SampleId, Trajectory]] = {"u": {}, "v": {}, "w": {}}
        self.late: set[str] = set()
        self.trained: list[list[Trajectory]] = []
        self.snapshots: list[dict[str, Any]] = []
        self._snapshot()

    def _snapshot(self) -> None:
        self.ledger.admit(len(self.trained), lambda ordinal: tuple(f"{ordinal}>".encode()))
        self.snapshots.append(json.loads(json.dumps(self.ledger.state_dict())))

    def _oldest(self, worker: str) -> Mapping[SampleId, int]:
        weights = self.weights[worker]
        return {
            key: trajectory.oldest if trajectory.oldest is not None else weights[1]
            for key, trajectory in self.running[worker].items()
            if weights is not None
        }

    @rule(worker=WORKERS)
    def renew(self, worker: str) -> None:
        """Take the newest weights, whatever is at work."""
        self.exchange(worker)
        self.weights[worker] = (self.generation, len(self.trained))

    @rule(worker=WORKERS, free=st.integers(1, 6), full=st.booleans())
    def claim(self, worker: str, free: int, full: bool) -> None:
        self.exchange(worker)
        held, awaited = self.weights[worker], self.ledger.awaited()
        pressed = self.ledger.pressure != "none"
        version = held[1] if held else None
        work = self.ledger.claim(worker, free=free, version=version, full=full)
        needed = max((each.version for each in work), default=0)
        assert needed <= len(self.trained), "the version is there"
        if work and (held is None or held[1] < needed):
            self.weights[worker] = (self.generation, needed)
        for each in work:
            assert not (full or pressed) or each.trajectory.ordinal in awaited
            self.running[worker][each.trajectory.key] = each.trajectory

    @rule(worker=WORKERS, token=TOKENS, count=st.integers(1, 3))
    def sample(self, worker: str, token: int, count: int) -> None:
        weights = self.weights[worker]
        for key, trajectory in list(self.running[worker].items())[:count]:
            assert weights is not None
            stamp = Stamp(generation=weights[0], version=weights[1], count=1)
            grown = msgspec.structs.replace(
                trajectory,
                tokens=(*trajectory.tokens, token),
                logprobs=(*trajectory.logprobs, -1.0),
                stamps=extend_stamps(trajectory.stamps, [stamp]),
            )
            self.running[worker][key] = grown
            if self.plan.limits.finished(grown):
                self.held[worker][key] = self.running[worker].pop(key)

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
        """Hand in what is finished, say what is at work, set aside what is beyond the budget."""
        again = worker in self.late
        self.late.discard(worker)
        for finished in self.held[worker].values():
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

    @rule(worker=WORKERS, part=st.floats(0, 1))
    def lose_worker(self, worker: str, part: float) -> None:
        """It dies; its log has what it finished, and of the rest some share of the tokens."""
        self.ledger.lose(worker)
        for trajectory in self.running[worker].values():
            self.ledger.recover(trajectory.first(int(len(trajectory.tokens) * part)))
        self._forget(worker)

    @rule(worker=WORKERS)
    def leave(self, worker: str) -> None:
        """It hands over what it has and goes."""
        self.exchange(worker)
        for trajectory in self.running[worker].values():
            self.ledger.recover(trajectory)
        self.ledger.leave(worker)
        assert not self.ledger.claimed(worker)
        self._forget(worker)

    def _forget(self, worker: str) -> None:
        for finished in self.held[worker].values():
            self.ledger.recover(finished)
        self.running[worker], self.held[worker], self.weights[worker] = {}, {}, None
        self.late.discard(worker)

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
        self._snapshot()
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
        told = again.batch(step)
        assert told is not None
        assert told[len(told) - len(reused) :] == reused or not reused

    def _release(self) -> None:
        protected = max(0, len(self.trained) - 2)
        released = self.ledger.released(protected)
        kept = {each.ordinal for batch in self.trained[:protected] for each in batch}
        assert set(range(released)) <= kept
        for worker, held in self.held.items():
            self.held[worker] = {key: each for key, each in held.items() if key[0] >= released}

    @rule(back=st.integers(0, 2), late=st.sets(WORKERS), rush=st.booleans())
    def restore(self, back: int, late: set[str], rush: bool) -> None:
        """The trainer dies and is restored from one of its last snapshots; some hear of it late.

        In a ``rush`` everything was promised to another before they do.
        """
        step = max(0, len(self.trained) - back)
        self.generation += 1
        self.ledger = Ledger(self.plan)
        self.ledger.load_state_dict(self.snapshots[step])
        self.trained, self.snapshots = self.trained[:step], self.snapshots[:step]
        self.ledger.resume(self.generation, restored=step)
        self._snapshot()
        self.late = set(self.running)
        for worker in sorted(self.late - late):
            self.exchange(worker)
        if rush:
            self.ledger.claim("another", free=99, version=None)
            self.ledger.lose("another")

    @invariant()
    def holds(self) -> None:
        assert self.ledger.check() == []
        assert sum(self.ledger.counts().values()) == self.ledger.admitted
        ahead = self.ledger.admitted - len(self.trained) * self.plan.fresh
        assert ahead <= self.plan.fresh * (self.plan.eta + 1)

    def teardown(self) -> None:
        """Everything can still be finished, by any one worker."""
        for worker in self.running:
            self.lose_worker(worker, 0.5)
        rounds = 0
        while len(self.trained) < self.plan.steps:
            self.busy("u")
            rounds += 1
            assert rounds < STANDSTILL, "the job stands still"
        assert self.ledger.check() == []
        assert self.ledger.staleness_max <= self.plan.eta
        ordinals = [each.ordinal for batch in self.trained for each in batch[:: self.plan.group]]
        assert sorted(ordinals) == list(range(self.plan.steps * self.plan.fresh))


class TightMachine(SchedulingMachine):
    """Half a step ahead, few tokens per step, and little memory."""

    plan = plan_of(
        order=Order.ARRIVAL, claims="longest", over_provision=0.5, token_budget=6, ledger_tokens=10
    )


class InOrderMachine(SchedulingMachine):
    """The steps take the prompts in order, within limits as well."""

    plan = plan_of(claims="longest", token_budget=5, ledger_tokens=8)


class ReplayMachine(SchedulingMachine):
    """Half of every step are groups trained before."""

    plan = plan_of(ReplayConfig(policy="prioritized", share=0.5, max_age=2), order=Order.ARRIVAL)


QUICK = settings(max_examples=40, stateful_step_count=40, deadline=None)
for machine in (SchedulingMachine, TightMachine, InOrderMachine, ReplayMachine):
    machine.TestCase.settings = QUICK
TestByArrival = SchedulingMachine.TestCase
TestTight = TightMachine.TestCase
TestInOrder = InOrderMachine.TestCase
TestReplay = ReplayMachine.TestCase
