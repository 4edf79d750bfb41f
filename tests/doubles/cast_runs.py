"""Runs without models that train one policy each and meet in a log of steps, and their judge.

The log, its rules, the part of each run and its ledger are those of production. A state is a digest
of all groups that it was trained on, and a token follows from the states of all policies of its
version: whoever trains a group twice, or on another one, ends with another state.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import msgspec

from doubles.memory_store import MemoryStore
from holdfast.adapters.rl.cast import rules
from holdfast.adapters.rl.cast.part import CastPart, CastWays, require_fit
from holdfast.adapters.rl.cast.step_log import StepLog
from holdfast.adapters.rl.config import RLConfig, preset
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.ledger.checker import StepChecker, observe
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.policy.settings import PolicyConfig
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory
from holdfast.elastic.errors import ConfigError

STEPS: Final = 8
_NAMES: Final = ("solver", "critic", "judge")
_WORKER: Final = "worker"
_FAULTY_TURNS: Final = 150
_TURNS: Final = 3000


class KilledError(Exception):
    """The process that changed the store was killed."""


class MortalStore(MemoryStore):
    """A store in memory; with a ``fuse`` the process that makes that many changes is killed.

    It dies before the last of them, or ``after`` it.
    """

    fuse = 0
    after = False

    def replace(self, name: str, data: bytes, *, expected: str | None) -> bool:
        """See `MemoryStore`."""
        dies = self._burnt()
        done = not (dies and not self.after) and super().replace(name, data, expected=expected)
        if dies:
            raise KilledError
        return done

    def delete(self, names: Iterable[str]) -> None:
        """See `MemoryStore`; each name is a change."""
        for name in names:
            if self._burnt():
                if self.after:
                    super().delete([name])
                raise KilledError
            super().delete([name])

    def _burnt(self) -> bool:
        self.fuse = max(-1, self.fuse - 1)
        return self.fuse == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSnapshot:
    """A run after ``step`` steps: its ``states`` by version, and its books as JSON."""

    step: int
    states: dict[int, str]
    books: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CastOffer:
    """The part of a run's `Offer` that others read."""

    reached: int
    keeps: int = 0
    over: bool = False


class CastServer:
    """Stands for `RolloutServer`, of one generation."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.lock = ledger, threading.RLock()

    def advance(self, completed: int, *, protected: int) -> None:
        """Admit prompts, and release what is protected."""
        self.ledger.admit(completed, prompt_of)
        self.ledger.released(protected)

    def wait_batch(self, step: int, *, timeout_s: float) -> list[Trajectory] | None:
        """Return the samples of ``step`` if all are there."""
        return self.ledger.batch(step)


class CastRun:
    """The run of one policy, over all its processes; it has none while ``part`` is None.

    ``every`` is the interval of its checkpoints, 0 for none.
    """

    def __init__(self, job: CastJob, name: str, *, every: int) -> None:
        self.job, self.name, self.every = job, name, every
        self.config = msgspec.structs.replace(
            job.config,
            policy=name,
            checkpoint="root" if every else None,
            checkpoint_every=every or 100,
        )
        self.completed, self.generation, self.wrong = 0, 0, list[str]()
        self.part: CastPart | None = None
        self.seen: CastOffer | None = None
        self.is_arriving = False
        self.states = {0: _digest(name)}
        self._ledger, self._checker = Ledger(self.config.plan), StepChecker()
        self._memory: dict[int, CastSnapshot] = {}
        self._pending: dict[int, CastSnapshot] = {}
        self._durable: dict[int, CastSnapshot] = {}

    # -- what the others and the part see ------------------------------------------------------

    def offer(self) -> CastOffer | None:
        """Return the newest notice; None if there is none."""
        return self.seen

    @property
    def keeps(self) -> int:
        """See `RunNotice`."""
        return self.seen.keeps if self.seen else 0

    def check(self) -> None:
        """Do nothing: nobody else trains this policy."""

    @property
    def reached(self) -> int:
        """The newest version that others can read."""
        return self.seen.reached if self.part is not None and self.seen is not None else -1

    @property
    def protected(self) -> int:
        """The newest step whose snapshot outlives a process."""
        return max(self._memory, default=-1)

    # -- the life of its processes -------------------------------------------------------------

    def arrive(self) -> None:
        """Begin again from the newest snapshot: the former notice is taken away.

        Raises ``ConfigError`` if the log has no place for it.
        """
        self.generation += 1
        self._ledger, self._checker = Ledger(self.config.plan), StepChecker()
        self.completed, self.states = 0, {0: _digest(self.name)}
        found = self._memory or self._durable
        if found:
            newest = found[max(found)]
            self.completed, self.states = newest.step, dict(newest.states)
            ledger, checker = json.loads(newest.books)
            self._ledger.load_state_dict(ledger)
            self._checker.load_state_dict(checker)
        self._ledger.resume(self.generation, restored=self.completed)
        require_fit(self.job.log, self.completed, self.config)
        self.seen, self.is_arriving = None, True

    def begin(self) -> None:
        """Show the run to the others, and take part."""
        restored = self.completed if self._memory or self._durable else -1
        self.seen, self.is_arriving = CastOffer(reached=restored), False
        self._protect(0)
        me: Any = self
        server: Any = CastServer(self._ledger)
        others: Any = CastOthers(self.job, self.name)
        ways = CastWays(
            log=self.job.log,
            others=others,
            notice=me,
            protected=lambda: self.protected,
            emit=lambda event: None,
            pause=lambda: None,
        )
        self.part = CastPart(
            me, self.config, server, ledger=self._ledger, prompt_of=prompt_of, ways=ways
        )

    def tell(self) -> None:
        """Renew the notice, as `RunNotice` does, and finish checkpoints."""
        if self.seen is None or self.part is None:
            return
        self._durable |= self._pending
        self._pending.clear()
        self._memory = {self._newest.step: self._newest}
        reached = max(self.seen.reached, self.protected)
        durable = max(self._durable, default=-1) if self.every else None
        every = self.config.checkpoint_every
        keeps = rules.kept_from(protected=max(0, reached), durable=durable, every=every)
        self.seen = CastOffer(reached=reached, keeps=keeps)

    def step(self, *, lag: int = 0) -> None:
        """Make the next step if its groups are there; see `_protect` for ``lag``."""
        step = self.completed
        if self.part is None or step == STEPS or not self.part.ready(step):
            return
        batch = self._ledger.batch(step)
        if batch is None:
            self.wrong.append(f"{self.name} is told that step {step} is there, and it is not")
            return
        self.part.publish(step, batch)
        self.wrong += self._checker.check(observe(self._ledger, step, batch))
        self._ledger.train(step)
        self.completed = step + 1
        self.states[step + 1] = trained(self.states[step], batch)
        for gone in [v for v in self.states if v <= step - max(1, self.config.eta)]:
            del self.states[gone]
        self._protect(lag)

    def sample(self, draw: random.Random) -> None:
        """Have a worker sample some of what is open, where all policies have the version."""
        if self.part is None:
            return
        for work in self._ledger.claim(_WORKER, free=draw.randint(1, 6), version=None):
            begun = work.trajectory
            version = self.config.plan.version_of(begun.ordinal)
            states = self.job.states(version)
            if states is None or draw.random() < 0.2:
                self._ledger.abandon(_WORKER, [begun.key])
                continue
            self._ledger.deliver(sampled(begun, states, self.generation, version))

    def die(self) -> None:
        """Lose the processes that train; their nodes keep what is protected."""
        self.part, self.is_arriving = None, False

    def lose(self, *, older: bool, all_of_it: bool = False) -> None:
        """Lose the whole run with its memory; with ``older`` the newest checkpoint, too."""
        self.die()
        self.generation = 0
        self._memory.clear()
        self._pending.clear()
        if older and len(self._durable) > 1:
            del self._durable[max(self._durable)]
        if all_of_it:
            self._durable.clear()

    def judge(self) -> list[str]:
        """Return all that is wrong."""
        found = [*self.wrong, *self._ledger.check()]
        if self.completed < STEPS:
            found.append(f"{self.name} never gets beyond step {self.completed}")
        elif self.states[STEPS] != self.job.expected[self.name]:
            found.append(f"{self.name} has learnt another thing than undisturbed")
        return found

    def _protect(self, lag: int) -> None:
        """Take a snapshot; with a ``lag`` it goes with the process, until the next `tell`."""
        books = json.dumps([self._ledger.state_dict(), self._checker.state_dict()])
        now = CastSnapshot(step=self.completed, states=dict(self.states), books=books)
        if self.every and self.completed and (self.completed % self.every == 0):
            self._pending[now.step] = now
        self._newest = now
        if not lag:
            self._memory = {now.step: now}


class CastOthers:
    """Stands for `OtherPolicies`: those of a job that others than ``name`` train."""

    def __init__(self, job: CastJob, name: str) -> None:
        self.each = {other: run for other, run in job.runs.items() if other != name}

    @property
    def reached(self) -> dict[str, int]:
        """The newest version of each."""
        return {name: run.reached for name, run in self.each.items()}

    def close(self) -> None:
        """Do nothing."""


class CastJob:
    """All runs of a job under a seed, and the log in which they meet; the first one leads."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        names, eta = _NAMES[: draw.randint(2, 3)], draw.randint(0, 2)
        self.config = _config(names, eta=eta)
        self.store = MortalStore()
        self.log = StepLog(self.store)
        self.runs: dict[str, CastRun] = {}
        for name in names:
            self.runs[name] = CastRun(self, name, every=draw.choice((0, 2, 3)))
        self.expected = undisturbed(self.config)
        self._may_wipe = draw.random() < 0.2
        self._pulled: tuple[int, dict[str, str]] | None = None

    def play(self) -> list[str]:
        """Run to the end; return all that is wrong. A refusal by name that is right ends it."""
        for turn in range(_TURNS):
            runs = [*self.runs.values()]
            if all(run.completed == STEPS for run in runs):
                break
            run = self._draw.choice(runs)
            try:
                self._turn(run, faulty=turn < _FAULTY_TURNS)
            except KilledError:
                run.die()
            except ConfigError as error:
                first, _ = self.log.span()
                if self._may_wipe and run.completed < first:
                    return []
                return [str(error)]
            self.store.fuse = 0
        return [what for run in self.runs.values() for what in run.judge()]

    def states(self, version: int) -> dict[str, str] | None:
        """Return the state of every policy at a version; None if one of them has it no more.

        The worker keeps the newest version that it read.
        """
        if self._pulled is not None and self._pulled[0] == version:
            return self._pulled[1]
        found = {
            name: run.states[version]
            for name, run in self.runs.items()
            if run.part is not None and version in run.states
        }
        if len(found) < len(self.runs):
            return None
        self._pulled = version, found
        return found

    def _turn(self, run: CastRun, *, faulty: bool) -> None:
        draw = self._draw
        if run.is_arriving:
            if draw.random() < 0.3:
                run.begin()
        elif run.part is None:
            if draw.random() < 0.5:
                run.arrive()
        elif faulty and draw.random() < 0.06:
            self._strike(run)
        else:
            if faulty and draw.random() < 0.1:
                self.store.fuse, self.store.after = draw.randint(1, 3), draw.random() < 0.5
            if draw.random() < 0.3:
                run.tell()
            if run.config.leads:
                run.sample(draw)
            run.step(lag=int(draw.random() < 0.3))

    def _strike(self, run: CastRun) -> None:
        draw = self._draw
        if draw.random() < 0.6:
            run.die()
        elif run.every:
            run.lose(older=draw.random() < 0.4)
        elif self._may_wipe:
            run.lose(older=False, all_of_it=True)


def undisturbed(config: RLConfig) -> dict[str, str]:
    """Return the last state of each policy, computed step by step without any run."""
    plan, names = config.plan, config.trained
    states = [{name: _digest(name) for name in names}]
    for step in range(STEPS):
        version = plan.oldest_at(step)
        groups = [
            sampled(
                Trajectory(ordinal=ordinal, sample=number, prompt=prompt_of(ordinal)),
                states[version],
                1,
                version,
            )
            for ordinal in range(step * plan.groups, (step + 1) * plan.groups)
            for number in range(plan.group)
        ]
        states.append({name: trained(states[step][name], groups) for name in names})
    return states[STEPS]


def sampled(begun: Trajectory, states: dict[str, str], generation: int, version: int) -> Trajectory:
    """Return a finished sample whose tokens follow from the states of all policies."""
    drawn = _digest(f"{begun.key} {sorted(states.items())}")
    tokens = tuple(3 + byte % 50 for byte in bytes.fromhex(drawn)[:2])
    done = msgspec.structs.replace(
        begun,
        tokens=tokens,
        logprobs=tuple(-float(token) for token in tokens),
        stamps=(Stamp(generation=generation, version=version, count=len(tokens)),),
    )
    return done.replied((), state="null", reward=float(tokens[0]))


def trained(state: str, batch: Sequence[Trajectory]) -> str:
    """Return the state after a step on a batch."""
    return _digest(state, *(f"{each.key} {each.tokens}" for each in batch))


def prompt_of(ordinal: int) -> tuple[int, ...]:
    """Return the tokens of a prompt."""
    return (3, 3 + ordinal)


def _config(names: Sequence[str], *, eta: int) -> RLConfig:
    return msgspec.structs.replace(
        preset("tiny"),
        environment=EnvironmentConfig(factory="reviewed"),
        policies={name: PolicyConfig() for name in names},
        join="cast",
        policy=names[0],
        groups=2,
        group=2,
        microbatches=4,
        eta=eta,
        steps=STEPS,
    )


def _digest(*words: str) -> str:
    return sha256("\n".join(words).encode()).hexdigest()[:16]
