"""Samples that go on under new weights: each trained once, never by a version too old or undone."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapters.rl.ledger import BatchPlan, Ledger, Mode, Verdict
from adapters.rl.trajectory import Limits, SampleId, Stamp, Trajectory, extend_stamps

END = 10
PLAN = BatchPlan(
    groups=2,
    group=2,
    eta=2,
    steps=6,
    limits=Limits(end=END, context=10, max_new_tokens=4),
    mode=Mode.BOUNDED,
)
WORKERS = st.sampled_from(["u", "v", "w"])
TOKENS = st.sampled_from([END, 97, 98, 99])
Weights = tuple[int, int]


class BoundedMachine(RuleBasedStateMachine):
    """A trainer that is restored now and then, and three workers that renew weights at will."""

    def __init__(self) -> None:
        super().__init__()
        self.generation = 1
        self.ledger = Ledger(PLAN)
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

    @rule(worker=WORKERS)
    def renew(self, worker: str) -> None:
        """Take the newest weights, whatever is at work."""
        self.announce(worker)
        self.weights[worker] = (self.generation, len(self.trained))

    @rule(worker=WORKERS, free=st.integers(1, 6))
    def claim(self, worker: str, free: int) -> None:
        self.announce(worker)
        held = self.weights[worker]
        work = self.ledger.claim(worker, free=free, version=held[1] if held else None)
        oldest = max((each.version for each in work), default=0)
        if work and (held is None or held[1] < oldest):
            self.weights[worker] = (self.generation, oldest)
        for each in work:
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
            if PLAN.limits.finished(grown):
                self.held[worker][key] = self.running[worker].pop(key)

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
        for finished in self.held[worker].values():
            self.ledger.deliver(finished, again=again)

    @rule(worker=WORKERS, part=st.floats(0, 1))
    def lose_worker(self, worker: str, part: float) -> None:
        """It dies; its log has what it finished, and of the rest some share of the tokens."""
        self.ledger.lose(worker)
        for trajectory in self.running[worker].values():
            self.ledger.recover(trajectory.first(int(len(trajectory.tokens) * part)))
        for finished in self.held[worker].values():
            self.ledger.recover(finished)
        self.running[worker], self.held[worker], self.weights[worker] = {}, {}, None
        self.late.discard(worker)

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
        self._snapshot()

    @rule(back=st.integers(0, 2), late=st.sets(WORKERS))
    def restore(self, back: int, late: set[str]) -> None:
        """The trainer dies and is restored from one of its last snapshots; some hear of it late."""
        step = max(0, len(self.trained) - back)
        self.generation += 1
        self.ledger = Ledger(PLAN)
        self.ledger.load_state_dict(self.snapshots[step])
        self.trained, self.snapshots = self.trained[:step], self.snapshots[:step]
        self.ledger.resume(self.generation, restored=step)
        self._snapshot()
        self.late = set(self.running)
        for worker in self.late - late:
            self.announce(worker)

    @rule(worker=WORKERS)
    def announce(self, worker: str) -> None:
        """A worker tells a new leader what it has, and leaves what is not to go on."""
        if worker not in self.late:
            return
        self.late.remove(worker)
        for finished in self.held[worker].values():
            self.ledger.deliver(finished, again=True)
        weights = self.weights[worker]
        if weights and not self.ledger.current(generation=weights[0], version=weights[1]):
            for left in self.running[worker].values():
                self.ledger.recover(left)
            self.running[worker], self.weights[worker] = {}, None
        for key in self.ledger.hold(worker, set(self.running[worker])):
            del self.running[worker][key]

    @invariant()
    def holds(self) -> None:
        assert self.ledger.check() == []
        assert sum(self.ledger.counts().values()) == max(
            self.ledger.admitted, len(self.trained) * PLAN.groups
        )

    def teardown(self) -> None:
        """Everything can still be finished."""
        for worker in self.running:
            self.lose_worker(worker, 0.5)
        while len(self.trained) < PLAN.steps:
            self.busy("u")
        assert self.ledger.check() == []
        assert self.ledger.staleness_max <= PLAN.eta


BoundedMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
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
    assert ledger.deliver(whole) is Verdict.ROLLED_BACK
    (first, *_) = ledger.claim("u", free=9, version=None)
    assert first.trajectory == whole.first(1)
    assert (ledger.counters.rolled_back, ledger.counters.tokens_recovered) == (1, 1)
