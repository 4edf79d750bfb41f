"""The life of one ledger, from empty to its thousandth step, and the costs on the way.

No model and no network: answers are made up, and arrive as decoded texts, as from a connection.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from holdfast.adapters.rl.ledger.checker import StepChecker, observe
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import Assignment, BatchPlan, Mode
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory, TurnLimits
from holdfast.ckpt.errors import HoldfastError, PeerError
from holdfast.elastic.tuning import release
from holdfast.tools.environment import resident_bytes

GROUP: Final = 8
TOKENS: Final = 16
_PROMPT: Final = 16
_SLOTS: Final = 64
_WORKERS: Final = 64
_STEPS: Final = 10**6
_FIRST_TOKEN: Final = 1000
"""Larger numbers than those that Python keeps anyway, as those of a real vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifePlan:
    """A ledger of ``samples`` open samples; a step trains ``groups`` groups, ``eta`` steps late.

    ``ages`` are numbers of trained steps after which it is measured again.
    """

    samples: int
    groups: int
    eta: int
    ages: tuple[int, ...]
    by_arrival: bool = False

    def batch_plan(self) -> BatchPlan:
        """Return the plan of the ledger."""
        limits = TurnLimits(end=1, context=1024, max_new_tokens=TOKENS)
        order = GroupOrder.ARRIVAL if self.by_arrival else GroupOrder.PROMPT
        return BatchPlan(
            groups=self.groups,
            group=GROUP,
            eta=self.eta,
            steps=_STEPS,
            limits=limits,
            mode=Mode.BOUNDED if self.by_arrival else Mode.FIXED_LAG,
            scheduling=Scheduling(order=order),
        )


class LedgerStage(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a ledger at one time of its life, in seconds of one core and in bytes.

    ``claim_s`` and ``delivery_s`` are of one sample, ``message_s`` of the other work for a message
    of a worker with 64 samples, ``step_s`` of the ledger's and its checker's work for a step; each
    since the stage before, 0: there were none. ``memory_bytes`` are of one open sample. The
    snapshot is the ledger's part of one, as encoded text. In the first one after the stage before,
    no new sample has a text yet.
    """

    name: str
    memory_bytes: float
    snapshot_bytes: int
    snapshot_s: float
    first_snapshot_s: float
    restore_s: float
    claim_s: float = 0.0
    delivery_s: float = 0.0
    message_s: float = 0.0
    step_s: float = 0.0


def live(plan: LifePlan) -> list[LedgerStage]:
    """Return the stages of a life: all open, all finished, and after each age."""
    return [*_Life(plan).stages()]


class _Life:
    def __init__(self, plan: LifePlan) -> None:
        self._plan = plan
        self._before_bytes = _settled_bytes()
        self.ledger = Ledger(plan.batch_plan())
        self.ledger.resume(1, restored=0)
        self._costs, self._checker = _LedgerCosts(), StepChecker()
        self._waits = True  # the trainer looks after every message, until it has a batch

    def stages(self) -> Iterator[LedgerStage]:
        self.ledger.admit(0, _prompt)
        yield self._stage("open")
        self._fill()
        yield self._stage("finished")
        for age in self._plan.ages:
            while self.ledger.trained_steps < age:
                self._step()
            yield self._stage(f"after {age:,} steps")

    def _fill(self) -> None:
        """Let workers take turns until every open sample is finished."""
        delivered = -1
        while delivered:
            work = {f"rollout/{at}": self._claim(f"rollout/{at}") for at in range(_WORKERS)}
            delivered = sum(self._deliver(worker, found) for worker, found in work.items())

    def _claim(self, worker: str) -> list[Assignment]:
        began_s = time.process_time()
        found = self.ledger.claim(worker, free=_SLOTS, version=None)
        self._costs.add("claim", began_s, count=len(found))
        return found

    def _deliver(self, worker: str, work: Sequence[Assignment]) -> int:
        """Report all samples of a worker as running, then deliver them."""
        step = self.ledger.trained_steps
        running = {each.trajectory.key: TOKENS for each in work}
        oldest = {each.trajectory.key: each.version for each in work}
        finished = [_answered(each, step) for each in work]
        began_s = time.process_time()
        abandoned = self.ledger.hold(worker, running, oldest=oldest)
        self.ledger.abandon(worker, self.ledger.claimed(worker) - running.keys())
        self.ledger.report(running)
        self.ledger.beyond_budget(worker)
        self.ledger.allowance(_WORKERS)
        self._waits = self._waits and self.ledger.batch(step) is None
        self._costs.add("message", began_s, count=bool(work))
        if abandoned:
            raise HoldfastError(f"{len(abandoned)} samples of a living worker are given up")
        began_s = time.process_time()
        for trajectory in finished:
            self.ledger.deliver(trajectory)
        self._costs.add("delivery", began_s, count=len(finished))
        return len(finished)

    def _step(self) -> None:
        """Train a step as the trainer does, and let workers fill its place."""
        ledger, step = self.ledger, self.ledger.trained_steps
        began_s = time.process_time()
        batch = ledger.batch(step)
        if batch is None:
            raise HoldfastError(f"step {step} is not complete though all samples are; report this")
        found = self._checker.check(observe(ledger, step, batch))
        ledger.train(step)
        ledger.admit(step + 1, _prompt)
        ledger.released(step)
        self._costs.add("step", began_s, count=1)
        if found:
            raise HoldfastError(f"the checker found {found[0]}; report this")
        self._waits = True
        self._fill()

    def _stage(self, name: str) -> LedgerStage:
        costs, samples = self._costs, len(self.ledger.states()) * GROUP
        began_s = time.process_time()
        self.ledger.state_dict()
        costs.add("first snapshot", began_s, count=1)
        memory_bytes = _settled_bytes() - self._before_bytes
        began_s = time.process_time()
        text = msgspec.json.encode(self.ledger.state_dict())
        costs.add("snapshot", began_s, count=1)
        self._costs = _LedgerCosts()
        return LedgerStage(
            name=name,
            memory_bytes=memory_bytes / samples,
            snapshot_bytes=len(text),
            snapshot_s=costs.mean_s("snapshot"),
            first_snapshot_s=costs.mean_s("first snapshot"),
            restore_s=_apart(_restore_s, text, self.ledger),
            claim_s=costs.mean_s("claim"),
            delivery_s=costs.mean_s("delivery"),
            message_s=costs.mean_s("message"),
            step_s=costs.mean_s("step"),
        )


class _LedgerCosts:
    """Processor seconds and counts by name."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, int]] = {}

    def add(self, name: str, began_s: float, *, count: int) -> None:
        """Add the time since ``began_s``, for so many operations."""
        before_s, before = self._found.get(name, (0.0, 0))
        self._found[name] = before_s + time.process_time() - began_s, before + count

    def mean_s(self, name: str) -> float:
        """Return the seconds of one operation, 0 without any."""
        seconds, count = self._found.get(name, (0.0, 0))
        return seconds / count if count else 0.0


def _restore_s(text: bytes, ledger: Ledger) -> float:
    """Return the seconds that it takes to restore a ledger from a text."""
    again = Ledger(ledger.plan)
    began_s = time.process_time()
    again.load_state_dict(msgspec.json.decode(text))
    seconds = time.process_time() - began_s
    if again.counts() != ledger.counts():
        raise HoldfastError(f"a restored ledger has {again.counts()}; report this")
    return seconds


def _apart(work: Callable[..., float], *words: object) -> float:
    """Return a figure that a copy of this process finds, so that its memory is not in this one."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        theirs.send(work(*words))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    theirs.close()
    with ours:
        try:
            found: float = ours.recv()
        except EOFError as error:
            raise PeerError("a process of the benchmark ended early") from error
        finally:
            process.join()
    return found


def _prompt(ordinal: int) -> Tokens:
    return tuple(range(_FIRST_TOKEN + ordinal % 64, _FIRST_TOKEN + ordinal % 64 + _PROMPT))


def _answered(work: Assignment, step: int) -> Trajectory:
    """Return a finished sample as it comes from a worker: every token is an object of its own."""
    stamp = Stamp(generation=1, version=min(work.version, step), count=TOKENS)
    done = msgspec.structs.replace(
        work.trajectory, tokens=_ANSWER, logprobs=_LOGPROBS, stamps=(stamp,)
    )
    return msgspec.msgpack.decode(msgspec.msgpack.encode(done), type=Trajectory)


_ANSWER: Final = tuple(range(_FIRST_TOKEN, _FIRST_TOKEN + TOKENS))
_LOGPROBS: Final = tuple(-1 / (3 + at) for at in range(TOKENS))


def _settled_bytes() -> float:
    """Return the memory of this process, without what it could give back."""
    gc.collect()
    release()
    return resident_bytes()
