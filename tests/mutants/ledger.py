"""Bugs of the reinforcement learning ledger, found by a small loop without models.

Three workers claim, sample, deliver, die and come back; the trainer is restored from earlier
snapshots of the ledger. The history contains every sample that a step trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import BatchPlan
from holdfast.adapters.rl.ledger.work.open_groups import OpenGroups
from holdfast.adapters.rl.samples.trajectory import SampleId, Stamp, Trajectory, TurnLimits
from holdfast.tools.chaos.judging.checker import check
from mutants.bug import Bug
from mutants.training import SmallJobHistory

_PLAN: Final = BatchPlan(
    groups=2, group=3, eta=2, steps=6, limits=TurnLimits(end=10, context=10, max_new_tokens=4)
)
_WORKERS: Final = ("u", "v", "w")
_TURNS: Final = 400


def trial(seed: int) -> str:
    """Run the loop of a seed; return the first thing that is wrong with its history, or ""."""
    loop = _Loop(seed)
    loop.run()
    reference = SmallJobHistory()
    for step in range(_PLAN.steps):
        _tell(reference, step, attempt=1, keys=_keys_of(step))
    verdict = check(loop.reported.history, reference=reference.history)
    found = [f"{each.check}: {each.message}" for each in verdict.violations]
    return "; ".join((loop.ledger.check() + found)[:1])


def _keys_of(step: int) -> list[SampleId]:
    first = step * _PLAN.groups
    return [(o, s) for o in range(first, first + _PLAN.groups) for s in range(_PLAN.group)]


def _tell(reported: SmallJobHistory, step: int, *, attempt: int, keys: list[SampleId]) -> None:
    reported.samples(step, 0, attempt, epoch=0, ids=[o * _PLAN.group + s for o, s in keys])
    reported.step(step, 0, attempt)


def _answer(ordinal: int, sample: int) -> tuple[int, ...]:
    """Return the one true sample, as counter-based noise would."""
    return (*(97 + (ordinal * 7 + sample * 3 + i) % 26 for i in range(1 + ordinal % 3)), 10)


class _Loop:
    """The loop of a seed; ``reported`` is its history."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"planted ledger {seed}")
        self.reported, self.ledger = SmallJobHistory(), Ledger(_PLAN)
        self.ledger.resume(1, restored=0)
        self._generation, self._done = 1, 0
        self._snapshots: list[dict[str, Any]] = []
        self._running: dict[str, dict[SampleId, int]] = {name: {} for name in _WORKERS}
        self._held: dict[str, list[Trajectory]] = {name: [] for name in _WORKERS}
        self._snapshot()

    def run(self) -> None:
        """Run until every step is trained. Raises ``TimeoutError`` if that takes too long."""
        for turn in range(_TURNS):
            if self._done == _PLAN.steps:
                return
            worker = self._draw.choice(_WORKERS)
            self._claim(worker)
            self._sample(worker)
            self._deliver(worker)
            if self._draw.random() < 0.15 and turn < _TURNS // 2:
                self._lose(worker)
            self._train()
            if self._draw.random() < 0.1 and turn < _TURNS // 2:
                self._restore()
        raise TimeoutError(f"step {self._done} is never complete: {self.ledger.counts()}")

    def _snapshot(self) -> None:
        self.ledger.admit(self._done, lambda ordinal: tuple(f"{ordinal}>".encode()))
        self._snapshots.append(json.loads(json.dumps(self.ledger.state_dict())))

    def _trajectory(self, key: SampleId, count: int) -> Trajectory:
        tokens = _answer(*key)[:count]
        version = _PLAN.version_of(key[0])
        stamp = Stamp(generation=self._generation, version=version, count=len(tokens))
        return Trajectory(
            ordinal=key[0],
            sample=key[1],
            prompt=tuple(f"{key[0]}>".encode()),
            tokens=tokens,
            logprobs=tuple(-1.0 / (1 + at) for at in range(len(tokens))),
            stamps=(stamp,) if tokens else (),
        )

    def _claim(self, worker: str) -> None:
        bound = {_PLAN.version_of(ordinal) for ordinal, _ in self._running[worker]}
        work = self.ledger.claim(
            worker, free=self._draw.randint(1, 6), version=next(iter(bound), None)
        )
        for each in work:
            self._running[worker][each.trajectory.key] = len(each.trajectory.tokens)

    def _sample(self, worker: str) -> None:
        for key in list(self._running[worker]):
            self._running[worker][key] += self._draw.randint(0, 2)
            if self._running[worker][key] >= len(_answer(*key)):
                del self._running[worker][key]
                self._held[worker].append(self._trajectory(key, 99))

    def _deliver(self, worker: str) -> None:
        """Deliver the finished samples; some of them come again, as after a lost answer."""
        for finished in self._held[worker]:
            self.ledger.deliver(finished)
        self._held[worker] = [each for each in self._held[worker] if self._draw.random() < 0.3]

    def _lose(self, worker: str) -> None:
        """Lose a worker; its log holds some of the tokens of each running sample."""
        self.ledger.lose(worker)
        for key, count in self._running[worker].items():
            logged = self._trajectory(key, self._draw.randint(0, count))
            if logged.tokens:
                self.ledger.recover(logged)
        for finished in self._held[worker]:
            self.ledger.recover(finished)
        self._running[worker], self._held[worker] = {}, []

    def _train(self) -> None:
        batch = self.ledger.batch(self._done)
        if batch is None:
            return
        keys = [trajectory.key for trajectory in batch]
        self.ledger.train(self._done)
        _tell(self.reported, self._done, attempt=self._generation, keys=keys)
        self._done += 1
        self._snapshot()

    def _restore(self) -> None:
        """Restore the trainer at an earlier step; the workers keep their samples."""
        step = max(0, self._done - self._draw.randint(0, 2))
        self._generation += 1
        self.ledger = Ledger(_PLAN)
        self.ledger.load_state_dict(self._snapshots[step])
        self._snapshots, self._done = self._snapshots[:step], step
        self.ledger.resume(self._generation, restored=step)
        self._snapshot()
        for worker in _WORKERS:
            for finished in self._held[worker]:
                self.ledger.deliver(finished, again=True)
            running = self._running[worker]
            void = {key for key in running if _PLAN.version_of(key[0]) > step}
            for key in void | self.ledger.hold(worker, running.keys() - void):
                del running[key]


# -- the bugs --------------------------------------------------------------------------------------


def _forgets_an_ordinal(real: Callable[[Ledger], dict[str, Any]]) -> Any:
    """Leave an ordinal that no worker has begun out of the saved ledger."""

    def state_dict(self: Ledger) -> dict[str, Any]:
        state = real(self)
        begun = {entry.ordinal for entry in self.samples()}
        fresh = [o for o in state["ordinals"] if o not in begun and str(o) not in state["dropped"]]
        kept = [o for o in state["ordinals"] if o not in fresh[-1:]]
        prompts = dict(zip(state["ordinals"], state["prompts"], strict=True))
        return {**state, "ordinals": kept, "prompts": [prompts[o] for o in kept]}

    return state_dict


def _keeps_the_claims_of_the_lost(_real: Any) -> Any:
    return lambda self, worker: None


def _trains_before_it_is_complete(real: Callable[..., Any]) -> Any:
    def accept(self: Any, entry: Any, trajectory: Trajectory) -> None:
        real(self, entry, trajectory)
        missing = [s for s in range(self.plan.group) if s not in entry.done]
        if len(missing) == 1:
            copy = next(iter(entry.done.values()))
            entry.done[missing[0]] = copy
            real(self, entry, copy)

    return accept


def _gives_out_nothing_again(real: Callable[[OpenGroups, str, set[SampleId]], None]) -> Any:
    """Leave samples of lost workers out of those that wait."""

    def release(self: Any, worker: str, keys: set[SampleId]) -> None:
        waiting, self.waiting = self.waiting, SimpleNamespace(touch=lambda group: None)
        real(self, worker, keys)
        self.waiting = waiting

    return release


def _bug(name: str, about: str, where: str, broken: Callable[[Any], Any], seed: int) -> Bug:
    return Bug(name=name, about=about, where=where, broken=broken, trial="ledger", seed=seed)


BUGS: Final = (
    _bug(
        "ordinal-lost",
        "a restored ledger lacks an ordinal that no worker had begun",
        "holdfast.adapters.rl.ledger.ledger:Ledger.state_dict",
        _forgets_an_ordinal,
        0,
    ),
    _bug(
        "claims-stay",
        "the claims of a lost worker are not reassigned",
        "holdfast.adapters.rl.ledger.work.claims:LedgerClaims._take_back",
        _keeps_the_claims_of_the_lost,
        1,
    ),
    _bug(
        "sample-copied",
        "a group counts as complete with one sample twice",
        "holdfast.adapters.rl.ledger.work.deliveries:LedgerDeliveries._accept",
        _trains_before_it_is_complete,
        0,
    ),
    _bug(
        "wait-forgotten",
        "the samples of a lost worker do not wait for another one",
        "holdfast.adapters.rl.ledger.work.open_groups:OpenGroups.release",
        _gives_out_nothing_again,
        7,
    ),
)
