"""Under any actions of workers, losses, repeats and omissions, every ordinal is trained once."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
from exploring import examples
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import BatchPlan
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory, TurnLimits

PLAN = BatchPlan(
    groups=2, group=3, eta=2, steps=5, limits=TurnLimits(end=10, context=10, max_new_tokens=4)
)
WORKERS = st.sampled_from(["u", "v", "w"])


def answer(ordinal: int, sample: int) -> Tokens:
    """Return the one true sample, as counter-based noise would."""
    letters = (97 + (ordinal * 7 + sample * 3 + i) % 26 for i in range(1 + ordinal % 3))
    return (*letters, 10)


def trajectory(
    ordinal: int, sample: int, count: int | None = None, *, generation: int
) -> Trajectory:
    tokens = answer(ordinal, sample)[:count]
    version = PLAN.version_of(ordinal)
    stamps = (Stamp(generation=generation, version=version, count=len(tokens)),) if tokens else ()
    return Trajectory(
        ordinal=ordinal,
        sample=sample,
        prompt=tuple(f"{ordinal}>".encode()),
        tokens=tokens,
        logprobs=tuple(-1.0 / (1 + t) for t in tokens),
        stamps=stamps,
    )


class LedgerMachine(RuleBasedStateMachine):
    """A trainer that snapshots and is restored, and three workers that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.generation = 1
        self.ledger = Ledger(PLAN)
        self.ledger.resume(1, restored=0)
        self.running: dict[str, dict[tuple[int, int], int]] = {"u": {}, "v": {}, "w": {}}
        self.finished: dict[str, list[Trajectory]] = {"u": [], "v": [], "w": []}
        self.late: set[str] = set()
        self.trained: list[list[Trajectory]] = []
        self.snapshots: list[dict[str, Any]] = []
        self._snapshot()

    def _snapshot(self) -> None:
        self.ledger.admit(len(self.trained), lambda ordinal: tuple(f"{ordinal}>".encode()))
        self.snapshots.append(json.loads(json.dumps(self.ledger.state_dict())))

    @rule(worker=WORKERS, free=st.integers(4, 12))
    def turn(self, worker: str, free: int) -> None:
        """A busy stretch without trouble."""
        self.claim(worker, free)
        for _ in range(4):
            self.sample(worker, 99)
        self.deliver(worker, False)
        self.train()

    @rule(worker=WORKERS, free=st.integers(1, 8))
    def claim(self, worker: str, free: int) -> None:
        self.announce(worker)
        bound = {PLAN.version_of(ordinal) for ordinal, _ in self.running[worker]}
        assert len(bound) < 2
        version = next(iter(bound), None)
        work = self.ledger.claim(worker, free=free, version=version)
        assert len({a.version for a in work} | bound) <= 1
        for assignment in work:
            key = assignment.trajectory.key
            assert answer(*key)[: len(assignment.trajectory.tokens)] == assignment.trajectory.tokens
            announced = self.running.keys() - self.late
            assert not any(key in self.running[other] for other in announced)
            self.running[worker][key] = len(assignment.trajectory.tokens)

    @rule(worker=WORKERS, count=st.integers(1, 4))
    def sample(self, worker: str, count: int) -> None:
        for key in list(self.running[worker])[:count]:
            self.running[worker][key] += 1
            if self.running[worker][key] >= len(answer(*key)):
                del self.running[worker][key]
                self.finished[worker].append(trajectory(*key, generation=self.generation))

    @rule(worker=WORKERS, again=st.booleans())
    def deliver(self, worker: str, again: bool) -> None:
        self.announce(worker)
        for finished in self.finished[worker]:
            self.ledger.deliver(finished, again=again)

    @rule(worker=WORKERS, part=st.floats(0, 1))
    def lose_worker(self, worker: str, part: float) -> None:
        """The worker dies; of each running sample its log has some share of the tokens."""
        self.ledger.lose(worker)
        for key, count in self.running[worker].items():
            logged = trajectory(*key, int(count * part), generation=self.generation)
            if logged.tokens:
                self.ledger.recover(logged)
        for finished in self.finished[worker]:
            self.ledger.recover(finished)
        self.running[worker], self.finished[worker] = {}, []

    @precondition(lambda self: len(self.trained) < PLAN.steps)
    @rule()
    def train(self) -> None:
        step = len(self.trained)
        batch = self.ledger.batch(step) if step < PLAN.steps else None
        if batch is not None:
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
        """A worker reports its samples to a new leader, and drops those done or another's."""
        if worker not in self.late:
            return
        self.late.remove(worker)
        for finished in self.finished[worker]:
            self.ledger.deliver(finished, again=True)
        running = self.running[worker]
        void = {key for key in running if PLAN.version_of(key[0]) > len(self.trained)}
        for key in void | self.ledger.hold(worker, running.keys() - void):
            del running[key]

    @invariant()
    def holds(self) -> None:
        assert self.ledger.check() == []
        assert sum(self.ledger.counts().values()) == max(
            self.ledger.admitted, len(self.trained) * PLAN.groups
        )

    def teardown(self) -> None:
        """Everything can still be finished, and then every sample was trained exactly once."""
        for worker in self.running:
            self.lose_worker(worker, 0.5)
        while len(self.trained) < PLAN.steps:
            self.claim("u", 99)
            for _ in range(5):
                self.sample("u", 99)
            self.deliver("u", False)
            self.train()
        expected = [
            [
                (ordinal, sample, answer(ordinal, sample))
                for ordinal in range(step * PLAN.groups, (step + 1) * PLAN.groups)
                for sample in range(PLAN.group)
            ]
            for step in range(PLAN.steps)
        ]
        assert [[(*t.key, t.tokens) for t in batch] for batch in self.trained] == expected
        assert self.ledger.staleness_max <= PLAN.eta


LedgerMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestLedger = LedgerMachine.TestCase
