"""A ledger with a trainer that is restored and workers that die, for property tests."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import hypothesis.strategies as st
import msgspec
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.ledger.replay import ReplayConfig
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import (
    SampleId,
    Stamp,
    Trajectory,
    TurnLimits,
    extend_stamps,
)

END = 10
NAMES = ("u", "v", "w")
WORKERS = st.sampled_from(NAMES)
TOKENS = st.sampled_from([END, 97, 98, 99])
STANDSTILL = 200
Weights = tuple[int, int]


def plan_of(replay: ReplayConfig | None = None, **scheduling: Any) -> BatchPlan:
    return BatchPlan(
        groups=2,
        group=2,
        eta=2,
        steps=6,
        limits=TurnLimits(end=END, context=10, max_new_tokens=4),
        mode=Mode.BOUNDED,
        scheduling=Scheduling(**scheduling),
        replay=replay or ReplayConfig(),
    )


def prompt_of(ordinal: int) -> Tokens:
    return tuple(f"{ordinal}>".encode())


def grown(trajectory: Trajectory, token: int, weights: Weights) -> Trajectory:
    """Return a trajectory with one more token, sampled with ``weights``."""
    stamp = Stamp(generation=weights[0], version=weights[1], count=1)
    return msgspec.structs.replace(
        trajectory,
        tokens=(*trajectory.tokens, token),
        logprobs=(*trajectory.logprobs, -1.0),
        stamps=extend_stamps(trajectory.stamps, [stamp]),
    )


class LedgerMachine(RuleBasedStateMachine):
    """A trainer that is restored now and then, and three workers that renew weights at will.

    Subclasses define the talk between workers and ledger: `meet` comes before anything else that a
    worker does, `busy` is a stretch without trouble.
    """

    plan: ClassVar[BatchPlan]

    def __init__(self) -> None:
        super().__init__()
        self.generation = 1
        self.ledger = Ledger(self.plan)
        self.ledger.resume(1, restored=0)
        self.trained: list[list[Trajectory]] = []
        self.snapshots: list[dict[str, Any]] = []
        self.hire()
        self.snapshot()

    def hire(self) -> None:
        """Begin with workers that have nothing; ``late`` ones have yet to meet a new leader."""
        self.weights: dict[str, Weights | None] = dict.fromkeys(NAMES)
        self.running: dict[str, dict[SampleId, Trajectory]] = {name: {} for name in NAMES}
        self.finished: dict[str, dict[SampleId, Trajectory]] = {name: {} for name in NAMES}
        self.late: set[str] = set()

    def snapshot(self) -> None:
        self.ledger.admit(len(self.trained), prompt_of)
        self.snapshots.append(json.loads(json.dumps(self.ledger.state_dict())))

    def meet(self, worker: str) -> None:
        raise NotImplementedError

    def busy(self, worker: str) -> None:
        raise NotImplementedError

    @rule(worker=WORKERS)
    def renew(self, worker: str) -> None:
        """Take the newest weights, whatever is at work."""
        self.meet(worker)
        self.weights[worker] = (self.generation, len(self.trained))

    @rule(worker=WORKERS, token=TOKENS, count=st.integers(1, 3))
    def sample(self, worker: str, token: int, count: int) -> None:
        weights = self.weights[worker]
        for key, trajectory in list(self.running[worker].items())[:count]:
            assert weights is not None
            self.running[worker][key] = grown(trajectory, token, weights)
            if self.plan.limits.finished(self.running[worker][key]):
                self.finished[worker][key] = self.running[worker].pop(key)

    @rule(worker=WORKERS, part=st.floats(0, 1))
    def lose_worker(self, worker: str, part: float) -> None:
        """It dies; its log has the finished samples, and some share of the tokens of the others."""
        self.ledger.lose(worker)
        for trajectory in self.running[worker].values():
            self.ledger.recover(trajectory.first(int(len(trajectory.tokens) * part)))
        self.forget(worker)

    def forget(self, worker: str) -> None:
        """Let go of a worker, whose finished samples go back into the ledger."""
        for finished in self.finished[worker].values():
            self.ledger.recover(finished)
        self.running[worker], self.finished[worker], self.weights[worker] = {}, {}, None
        self.late.discard(worker)

    def go_back(self, back: int) -> None:
        """Restore ledger and trainer to their state of some steps ago."""
        step = max(0, len(self.trained) - back)
        self.ledger = Ledger(self.plan)
        self.ledger.load_state_dict(self.snapshots[step])
        self.trained, self.snapshots = self.trained[:step], self.snapshots[:step]
        self.ledger.resume(self.generation, restored=step)
        self.snapshot()

    @rule(back=st.integers(0, 2), late=st.sets(WORKERS), rush=st.booleans())
    def restore(self, back: int, late: set[str], rush: bool) -> None:
        """The trainer dies and is restored from one of its last snapshots; some hear of it late.

        In a ``rush`` everything was promised to another before they do.
        """
        self.generation += 1
        self.go_back(back)
        self.late = set(self.running)
        for worker in sorted(self.late - late):
            self.meet(worker)
        if rush:
            self.ledger.claim("another", free=99, version=None)
            self.ledger.lose("another")

    @rule(back=st.integers(0, 2))
    def start_again(self, back: int) -> None:
        """Everything is gone; the job is started again from a checkpoint, in generation 1."""
        self.generation = 1
        self.go_back(back)
        self.hire()

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
