"""Bugs of steps that pass over groups of equal rewards, found by a small loop without models.

Workers of random speed claim, deliver and die; the trainer is restored from earlier snapshots. The
steps must train on the next groups that teach something, by the same versions as in a calm run.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import msgspec

from holdfast.adapters.rl.ledger.checker import StepChecker, observe
from holdfast.adapters.rl.ledger.group import Group
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.ledger.states import OrdinalEvent
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import SampleId, Stamp, Trajectory, TurnLimits
from mutants.bug import Bug

GROUPS, GROUP, STEPS, TURNS = 2, 3, 5, 3000
CONTEXT = 10
LIMITS = TurnLimits(end=10, context=CONTEXT, max_new_tokens=4)
WORKERS = ("u", "v", "w")


def plan_of(eta: int, mode: Mode, *, limit: int = 50, **other: Any) -> BatchPlan:
    return BatchPlan(
        groups=GROUPS,
        group=GROUP,
        eta=0 if mode is Mode.SYNC else eta,
        steps=STEPS,
        limits=LIMITS,
        mode=mode,
        scheduling=Scheduling(skip_equal=limit, **other),
    )


def plain_steps(equal: Collection[int], long: Collection[int]) -> list[list[int]]:
    """Return the ordinals that each step trains on: the next ones that teach something."""
    teaching = (o for o in itertools.count() if o not in equal and o not in long)
    return [list(itertools.islice(teaching, GROUPS)) for _ in range(STEPS)]


class Life:
    """A ledger with three workers of random speed that die, and a trainer that is restored."""

    def __init__(
        self,
        plan: BatchPlan,
        *,
        equal: Collection[int],
        long: Collection[int] = (),
        seed: int = 0,
        trouble: float = 0.0,
    ) -> None:
        self.plan, self.equal, self.long, self.trouble = plan, equal, long, trouble
        self.draw = random.Random(seed)
        self.generation, self.trained = 1, list[list[Trajectory]]()
        self.snapshots: list[str] = []
        self.ledger, self.checker = self._new()
        self.ledger.resume(1, restored=0)
        self.running: dict[str, dict[SampleId, Trajectory]] = {name: {} for name in WORKERS}
        self.versions: dict[SampleId, int] = {}
        self.found: list[str] = []
        self._snapshot()

    def _new(self) -> tuple[Ledger, StepChecker]:
        return Ledger(self.plan, reward_of=self._reward), StepChecker()

    def _reward(self, sample: Trajectory) -> float:
        return 0.25 if sample.ordinal in self.equal else float(sample.sample % 2)

    def _prompt(self, ordinal: int) -> Tokens:
        return (1,) * (CONTEXT if ordinal in self.long else 3)

    def _snapshot(self) -> None:
        self.ledger.admit(len(self.trained), self._prompt)
        both = [self.ledger.state_dict(), self.checker.state_dict()]
        self.snapshots.append(json.dumps(both))

    def run(self) -> list[list[Trajectory]]:
        for turn in range(TURNS):
            if len(self.trained) == STEPS or self.ledger.stuck:
                return self.trained
            trouble = self.trouble if turn < TURNS // 10 else 0.0
            worker = self.draw.choice(WORKERS)
            self._claim(worker)
            self._deliver(worker)
            if self.draw.random() < trouble:
                self.ledger.lose(worker)
                self.running[worker].clear()
            if self.draw.random() < 0.5:
                self._train()
            if self.draw.random() < trouble:
                self._restore(self.draw.randint(0, 2))
            self._holds()
        raise TimeoutError(f"step {len(self.trained)} is never complete: {self.ledger.counts()}")

    def _holds(self) -> None:
        assert self.ledger.check() == []
        assert sum(self.ledger.counts().values()) == self.ledger.admitted

    def _claim(self, worker: str) -> None:
        running = self.running[worker]
        bound = {self.versions[key] for key in running} if self.plan.pinned else {self._newest()}
        work = self.ledger.claim(
            worker, free=self.draw.randint(0, 3), version=next(iter(bound), None)
        )
        for each in work:
            key, most = each.trajectory.key, self._newest()
            assert each.version <= most
            self.versions[key] = each.version if self.plan.pinned else most
            running[key] = each.trajectory

    def _newest(self) -> int:
        return len(self.trained)

    def _deliver(self, worker: str) -> None:
        running = self.running[worker]
        for key in self.draw.sample(sorted(running), self.draw.randint(0, len(running))):
            stamp = Stamp(generation=self.generation, version=self.versions[key], count=2)
            done = msgspec.structs.replace(
                running.pop(key), tokens=(65, 10), logprobs=(-1.0, -1.0), stamps=(stamp,)
            )
            self.ledger.deliver(done)

    def _train(self) -> None:
        step = len(self.trained)
        if step == STEPS or (batch := self.ledger.batch(step)) is None:
            return
        seen = observe(self.ledger, step, batch)
        self.ledger.train(step)
        self.found += self.checker.check(seen)
        self.trained.append(batch)
        self._snapshot()
        released = self.ledger.released(max(0, len(self.trained) - 2))
        assert all(each.ordinal >= released for batch in self.trained[-2:] for each in batch)

    def _restore(self, back: int) -> None:
        """The trainer goes back; its workers lose what is at work."""
        step = max(0, len(self.trained) - back)
        self.generation += 1
        ledger, checker = json.loads(self.snapshots[step])
        self.ledger, self.checker = self._new()
        self.ledger.load_state_dict(ledger)
        self.checker.load_state_dict(checker)
        self.ledger.resume(self.generation, restored=step)
        self.trained, self.snapshots = self.trained[:step], self.snapshots[:step]
        for worker in WORKERS:
            self.running[worker].clear()
        self._snapshot()


def ordinals(steps: list[list[Trajectory]]) -> list[list[int]]:
    """Return the ordinals of each step."""
    return [sorted({each.ordinal for each in batch}) for batch in steps]


def versions(steps: list[list[Trajectory]]) -> list[dict[int, frozenset[int]]]:
    """Return the versions that sampled the ordinals of each step."""
    return [{each.ordinal: each.versions for each in batch} for batch in steps]


def trial(seed: int) -> str:
    """Run the loop of a seed; return the first thing that is wrong with it, or ""."""
    draw = random.Random(f"planted skipping {seed}")
    plan = plan_of(draw.randint(0, 2), draw.choice((Mode.FIXED_LAG, Mode.SYNC)))
    equal = {ordinal for ordinal in range(25) if draw.random() < 0.5}
    life = Life(plan, equal=equal, seed=seed, trouble=0.05)
    trained = life.run()
    calm = Life(plan, equal=equal).run()
    if life.found:
        return life.found[0]
    if ordinals(trained) != plain_steps(equal, ()):
        return f"trained {ordinals(trained)}, wanted {plain_steps(equal, ())}"
    return "" if versions(trained) == versions(calm) else "sampled by versions of its own"


# -- the bugs --------------------------------------------------------------------------------------


def _compares_two_rewards(_real: Any) -> Any:
    def judge(self: Group, rewards: Any) -> None:
        self.rewards = tuple(rewards)
        if self.rewards[0] == self.rewards[-1]:
            self.move(OrdinalEvent.SKIP)

    return judge


def _forgets_what_is_skipped(real: Callable[..., None]) -> Any:
    def load_state_dict(self: Any, state: Mapping[str, Any]) -> None:
        real(self, {**state, "skipped": []})

    return load_state_dict


def _further_group_for_later(real: Callable[..., None]) -> Any:
    return lambda self, ordinal, now=False: real(self, ordinal)


def _bug(name: str, about: str, where: str, broken: Callable[[Any], Any], seed: int) -> Bug:
    return Bug(name=name, about=about, where=where, broken=broken, trial="skipping", seed=seed)


BUGS: Final = (
    _bug(
        "two-rewards",
        "a group is skipped if its first and its last reward are equal",
        "holdfast.adapters.rl.ledger.group:Group.judge",
        _compares_two_rewards,
        0,
    ),
    _bug(
        "skips-forgotten",
        "a restored ledger counts skipped groups as ones to train on",
        "holdfast.adapters.rl.ledger.taking:ByReward.load_state_dict",
        _forgets_what_is_skipped,
        12,
    ),
    _bug(
        "filled-late",
        "a further group that a step needs is admitted as one of a later step",
        "holdfast.adapters.rl.ledger.taking:ByReward.admit",
        _further_group_for_later,
        0,
    ),
)
