"""The checker accepts every history of a ledger, and finds every change made to a step."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from holdfast.adapters.rl.ledger.checker import ObservedStep, SampleRow, StepChecker, observe
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import BatchPlan, Mode
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory, TurnLimits

LIMITS = TurnLimits(end=10, context=10, max_new_tokens=4)
GROUPS, GROUP, STEPS = 2, 2, 5


def finished(start: Trajectory, *, generation: int, version: int, count: int) -> Trajectory:
    tokens = (*range(20, 20 + count - 1), 10)
    return msgspec.structs.replace(
        start,
        tokens=tokens,
        logprobs=tuple(-float(token) for token in tokens),
        stamps=(Stamp(generation=generation, version=version, count=count),),
    )


class Life:
    """A ledger and its checker through steps and restores."""

    def __init__(self, eta: int) -> None:
        self.plan = BatchPlan(
            groups=GROUPS, group=GROUP, eta=eta, steps=STEPS, limits=LIMITS, mode=Mode.FIXED_LAG
        )
        self.generation, self.snapshots = 0, list[str]()
        self.ledger, self.checker = Ledger(self.plan), StepChecker()
        self._keep()
        self.restore(0)

    def _keep(self) -> None:
        both = [self.ledger.state_dict(), self.checker.state_dict()]
        self.snapshots.append(json.dumps(both))

    def restore(self, back: int) -> None:
        """Begin a generation, up to ``back`` steps before the newest."""
        self.generation += 1
        del self.snapshots[max(1, len(self.snapshots) - back) :]
        ledger, checker = json.loads(self.snapshots[-1])
        self.ledger, self.checker = Ledger(self.plan), StepChecker()
        self.ledger.load_state_dict(ledger)
        self.checker.load_state_dict(checker)
        self.ledger.resume(self.generation, restored=len(self.snapshots) - 1)

    def seen(self, lengths: list[int]) -> ObservedStep:
        """Sample the missing samples and return the checker's input for the next step."""
        number = self.ledger.trained_steps
        self.ledger.admit(number, lambda ordinal: (ordinal,))
        while self.ledger.batch(number) is None:
            for count, each in enumerate(self.ledger.claim("w", free=8, version=None)):
                length = lengths[count % len(lengths)]
                self.ledger.deliver(
                    finished(
                        each.trajectory,
                        generation=self.generation,
                        version=each.version,
                        count=length,
                    )
                )
        batch = self.ledger.batch(number)
        assert batch is not None
        return observe(self.ledger, number, batch)

    def train(self, lengths: list[int]) -> list[str]:
        seen = self.seen(lengths)
        self.ledger.train(seen.step)
        found = self.checker.check(seen)
        self._keep()
        return found


LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(eta=st.integers(0, 2), turns=st.lists(st.tuples(LENGTHS, st.integers(-1, 2)), max_size=9))
def test_a_ledgers_life_has_no_violation(eta: int, turns: list[tuple[list[int], int]]) -> None:
    life = Life(eta)
    for lengths, back in turns:
        if back >= 0:
            life.restore(back)
        if life.ledger.trained_steps < STEPS:
            assert life.train(lengths) == []
    assert life.checker.count == 0


def spoiled(seen: ObservedStep, index: int, how: int) -> ObservedStep:
    """Change one thing of one row."""
    rows = list(seen.rows)
    row = rows[index]
    stamp = row.stamps[0]
    by: SampleRow | None = [
        msgspec.structs.replace(row, logprobs=row.logprobs + 1),
        msgspec.structs.replace(row, tokens=row.tokens + 1),
        msgspec.structs.replace(row, sample=GROUP),
        msgspec.structs.replace(row, ordinal=row.ordinal + 1),
        msgspec.structs.replace(row, ordinal=max(0, row.ordinal - GROUPS)),
        msgspec.structs.replace(
            row, stamps=(msgspec.structs.replace(stamp, version=seen.step + 1),)
        ),
        msgspec.structs.replace(
            row, stamps=(msgspec.structs.replace(stamp, version=stamp.version - seen.eta - 3),)
        ),
        None,
    ][how]
    rows[index : index + 1] = [] if by is None else [by]
    return msgspec.structs.replace(seen, rows=tuple(rows))


@given(
    eta=st.integers(0, 2),
    before=st.integers(1, 3),
    index=st.integers(0, GROUPS * GROUP - 1),
    how=st.integers(0, 7),
    restores=st.booleans(),
)
def test_anything_that_is_changed_in_a_row_is_found(
    eta: int, before: int, index: int, how: int, restores: bool
) -> None:
    life = Life(eta)
    for _ in range(before):
        life.train([3])
    if restores:
        life.restore(0)
    seen = life.seen([3])
    assert life.checker.check(spoiled(seen, index, how))
