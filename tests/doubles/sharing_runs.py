"""Runs without models that share samples through a store in memory, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from doubles.memory_store import MemoryStore
from holdfast.adapters.rl.ledger.checker import StepChecker, observe
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.samples.borrowed import Borrowed, GroupOrigin
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory, TurnLimits
from holdfast.adapters.rl.sharing.mailbox import GroupMailbox
from holdfast.adapters.rl.sharing.settings import Share
from holdfast.adapters.rl.sharing.sharing import GroupSharing

OWN: Final = 2
GROUP: Final = 2
STEPS: Final = 8
_TURN_S: Final = 120.0
_PLAN: Final = BatchPlan(
    groups=OWN,
    group=GROUP,
    eta=0,
    steps=STEPS,
    limits=TurnLimits(end=9, context=12, max_new_tokens=4),
    mode=Mode.SYNC,
)


class SharedPool:
    """The store of several runs; ``seen`` maps an origin to the tokens that were first borrowed."""

    def __init__(self) -> None:
        self.mailbox = GroupMailbox(MemoryStore())
        self.seen: dict[tuple[GroupOrigin, int], tuple[int, ...]] = {}


class SharingRun:
    """A run ``name``: its ledger, checker and sharing, and a snapshot of them for every step.

    ``trained`` has the origins that each step of the surviving history borrowed, ``wrong`` all that
    is not as promised.
    """

    def __init__(self, pool: SharedPool, name: str, *, others: int, keep: int = 64) -> None:
        self.pool, self.wrong = pool, list[str]()
        self.trained: list[list[GroupOrigin]] = []
        self._share = Share(
            meet="memory://pool", name=name, own=OWN, others=others, family="f", keep=keep
        )
        self._life, self._snapshots = 0, list[str]()
        self._enter()
        self._keep()

    @property
    def done(self) -> int:
        """Number of complete steps."""
        return len(self.trained)

    def step(self, *, lag: int = 0) -> None:
        """Make a step; its predecessors are protected but for the last ``lag`` ones."""
        self.trained.append(self._train(lag))
        self._keep()

    def die_in_step(self, *, lag: int = 0) -> None:
        """Begin a step and lose the process before it is complete; begin it again."""
        lost = self._train(lag)
        self._enter()
        self.step(lag=lag)
        if self.trained[-1] != lost:
            self._note(f"step {self.done} borrows {self.trained[-1]}, before it was killed {lost}")

    def go_back(self, steps: int) -> None:
        """Restore the state of so many steps ago."""
        kept = max(0, self.done - steps)
        del self.trained[kept:], self._snapshots[kept + 1 :]
        self._enter()

    def judge(self) -> list[str]:
        """Return all that is wrong."""
        taken = [origin for each in self.trained for origin in each]
        twice = sorted(str(each) for each in set(taken) if taken.count(each) > 1)
        own = sorted(str(each) for each in taken if each.island == self._share.name)
        found = [*self.wrong, *self._ledger.check()]
        found += [f"{self._share.name} trained on {twice} twice"] if twice else []
        found += [f"{self._share.name} borrowed {own} from itself"] if own else []
        return found

    def _enter(self) -> None:
        self._life += 1
        self._ledger, self._checker = Ledger(_PLAN), StepChecker()
        self._sharing = GroupSharing(
            self._share, mailbox=self.pool.mailbox, group=GROUP, context=12, emit=lambda _: None
        )
        if self._snapshots:
            ledger, checker, sharing = json.loads(self._snapshots[-1])
            self._ledger.load_state_dict(ledger)
            self._checker.load_state_dict(checker)
            self._sharing.load_state_dict(sharing)
        self._ledger.resume(self._life, restored=self.done)

    def _keep(self) -> None:
        parts: Sequence[Any] = (self._ledger, self._checker, self._sharing)
        self._snapshots.append(json.dumps([part.state_dict() for part in parts]))

    def _train(self, lag: int) -> list[GroupOrigin]:
        step, ledger = self.done, self._ledger
        ledger.admit(step, lambda ordinal: (1, ordinal))
        for each in ledger.claim("w", free=OWN * GROUP, version=None):
            ledger.deliver(self._sampled(each.trajectory, step))
        own, borrowed = ledger.batch(step), ledger.borrowing.due(step)
        assert own is not None
        seen = observe(ledger, step, [*own, *borrowed], island=self._share.name)
        ledger.train(step)
        self._sharing.settle(step, ledger, samples=own, borrowed=borrowed, protected=step - lag)
        self._sharing.await_turn(_TURN_S)
        for what in self._checker.check(seen):
            self._note(what)
        for sample in borrowed:
            self._compare(sample)
        return list(dict.fromkeys(sample.origin for sample in borrowed))

    def _sampled(self, start: Trajectory, step: int) -> Trajectory:
        """Return a sample that is another one in each life, as where samples are not pinned."""
        tokens = (2 + self._life % 6, 9)
        return msgspec.structs.replace(
            start,
            tokens=tokens,
            logprobs=tuple(-float(token) for token in tokens),
            stamps=(Stamp(generation=self._life, version=step, count=len(tokens)),),
        )

    def _compare(self, sample: Borrowed) -> None:
        first = self.pool.seen.setdefault((sample.origin, sample.sample), sample.tokens)
        if first != sample.tokens:
            self._note(f"sample {sample.sample} of {sample.origin} is {sample.tokens}, was {first}")

    def _note(self, what: str) -> None:
        self.wrong.append(f"{self._share.name}: {what}")
