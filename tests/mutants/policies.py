"""Bugs of the books of several policies, found by the always-on checker, which counts by itself.

Episodes of two policies are delivered and trained; the ledger and the checker are restored from
snapshots of earlier steps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import Any, Final

from holdfast.adapters.rl.ledger.checker import StepChecker, observe
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory, TurnLimits
from mutants.bug import Bug

_PLAN: Final = BatchPlan(
    groups=2,
    group=2,
    eta=0,
    steps=8,
    mode=Mode.SYNC,
    limits=TurnLimits(end=10, context=40, max_new_tokens=4, turns=True),
)
_POLICIES: Final = ("solver", "critic")


def trial(seed: int) -> str:
    """Train the episodes of a seed; return the first violation, or ""."""
    draw = random.Random(f"planted policies {seed}")
    ledger, checker, generation = Ledger(_PLAN, policies=_POLICIES), StepChecker(), 1
    ledger.resume(generation, restored=0)
    snapshots: list[str] = []
    while ledger.trained_steps < _PLAN.steps:
        step = ledger.trained_steps
        state = {"ledger": ledger.state_dict(), "checker": checker.state_dict()}
        snapshots[step:] = [json.dumps(state)]
        if generation < 4 and draw.random() < 0.3:
            generation += 1
            saved = json.loads(snapshots[step := draw.randint(max(0, step - 1), step)])
            ledger, checker = Ledger(_PLAN, policies=_POLICIES), StepChecker()
            ledger.load_state_dict(saved["ledger"])
            checker.load_state_dict(saved["checker"])
            ledger.resume(generation, restored=step)
        ledger.admit(step, lambda ordinal: (1, 2))
        for each in ledger.claim("w", free=99, version=None):
            ledger.deliver(_episode(draw, each.trajectory, generation=generation, version=step))
        batch = ledger.batch(step)
        assert batch is not None
        if found := checker.check(observe(ledger, step, batch)):
            return found[0]
        ledger.train(step)
    return ""


def _episode(
    draw: random.Random, begun: Trajectory, *, generation: int, version: int
) -> Trajectory:
    """Return a finished episode of some turns, each by one of the two."""
    now = begun
    for turn in range(turns := draw.randint(1, 3)):
        count = draw.randint(1, 4)
        stamp = Stamp(generation=generation, version=version, count=now.sampled + count)
        now = Trajectory(
            ordinal=now.ordinal,
            sample=now.sample,
            prompt=now.prompt,
            tokens=(*now.tokens, *[9] * count),
            logprobs=(*now.logprobs, *[-1.0] * count),
            stamps=(stamp,),
            turns=now.turns,
        )
        reward = draw.random() if turn == turns - 1 else None
        now = now.replied((), state="null", reward=reward, then=draw.randint(0, 1))
    return now


def _books_all_on_the_first(real: Callable[..., Any]) -> Any:
    def add(self: Any, samples: Iterable[Trajectory]) -> None:
        for sample in samples:
            self._books[0].turns += len(sample.turns)
            self._books[0].tokens += sample.sampled

    return add


def _forgets_the_second_book(real: Callable[..., Any]) -> Any:
    def state_dict(self: Any) -> Any:
        state = real(self)
        state["books"][1] = {"turns": 0, "tokens": 0}
        return state

    return state_dict


def _bug(name: str, about: str, where: str, broken: Callable[[Any], Any], seed: int) -> Bug:
    return Bug(name=name, about=about, where=where, broken=broken, trial="policies", seed=seed)


BUGS: Final = (
    _bug(
        "books-mixed",
        "tokens of every policy are counted for the first one",
        "holdfast.adapters.rl.ledger.counters:Books.add",
        _books_all_on_the_first,
        0,
    ),
    _bug(
        "book-forgotten",
        "a restored ledger has an empty book of the second policy",
        "holdfast.adapters.rl.ledger.counters:Books.state_dict",
        _forgets_the_second_book,
        0,
    ),
)
