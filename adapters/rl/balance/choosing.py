"""The choice of the worker that should move between training and sampling. Pure.

A step's time has two parts: the trainers' and the rollout workers'. If sampling runs ahead of
training (``staleness`` above 0), a step takes as long as the longer part, otherwise as long as
both. From the measured shares follows each part, and from that the time of a step after a move. The
trainers' part changes with the most microbatches that any group of ranks has, the other one with
the number of workers.

That is an estimate: a machine may be busy, and long answers do not become shorter with more
workers. So every move is judged by the steps that follow it. One that gained too little is not
tried again for a time that doubles with each failure, and one that cost time is undone. Hence a job
whose step times stay as they are comes to rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from holdfast.adapters.rl.balance.settings import BalanceConfig

SETTLING_STEPS: Final = 2
"""The first steps of a generation, which nothing is concluded from: workers warm up."""

MOVE_S: Final = 5.0
"""Seconds that a move costs, until one was measured."""

_WORTH: Final = 2.0
_HELD_UP: Final = 0.05
_PAUSE_WINDOWS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step's ``seconds``, and the ``waited_s`` of them for which rank 0 waited for samples.

    ``working`` is the share of the rollout workers' time in which they had something to do.
    """

    seconds: float
    waited_s: float
    working: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The numbers of workers that train and that sample."""

    trainers: int
    rollouts: int

    def moved(self, count: int) -> Roles:
        """Return the numbers after ``count`` rollout workers became trainers (or the reverse)."""
        return Roles(trainers=self.trainers + count, rollouts=self.rollouts - count)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """The bounds of a job's roles.

    A group of ``unit`` ranks runs whole microbatches, of which a step has ``microbatches``; at
    least ``least_groups`` train. ``overlaps``: sampling runs ahead of training.
    """

    unit: int = 1
    least_groups: int = 1
    microbatches: int = 1
    overlaps: bool = True

    def passes(self, roles: Roles) -> int:
        """Return the most microbatches of a step that a group has, one after the other."""
        groups = max(1, min(roles.trainers // self.unit, self.microbatches))
        return -(-self.microbatches // groups)

    def allows(self, roles: Roles) -> bool:
        """Return whether a job can go on with these numbers, all of them at work."""
        groups = roles.trainers // self.unit
        return roles.rollouts >= 1 and self.least_groups <= groups <= self.microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The medians of some steps: their seconds, and the shares of who waited and who worked."""

    step_s: float
    waits: float
    works: float

    @classmethod
    def of(cls, steps: Sequence[StepTime]) -> Shares:
        """Return the medians of at least one step."""
        return cls(
            step_s=median(each.seconds for each in steps),
            waits=median(min(1.0, each.waited_s / max(each.seconds, 1e-9)) for each in steps),
            works=median(each.working for each in steps),
        )

    def after(self, now: Roles, then: Roles, shape: JobShape) -> float:
        """Return the expected seconds of a step with other numbers of workers."""
        slower, more = shape.passes(then) / shape.passes(now), now.rollouts / then.rollouts
        waits_s = self.step_s * self.waits
        training_s = (self.step_s - waits_s) * slower
        if not shape.overlaps:
            return training_s + waits_s * more
        if self.waits > _HELD_UP:  # the trainers are held up: sampling takes all of the step
            return max(training_s, self.step_s * more)
        return max(self.step_s * slower, self.step_s * self.works * more)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChoice:
    """The numbers of workers that a job should have, and why."""

    roles: Roles
    shares: Shares
    expected_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    before: Roles
    after: Roles
    step_s: float


@dataclass(slots=True)
class Balancer:
    """Chooses from the times of a job's steps, over many generations; it has no clock."""

    shape: JobShape
    settings: BalanceConfig = field(default_factory=BalanceConfig)
    move_s: float = MOVE_S
    _roles: Roles | None = None
    _settling: int = 0
    _steps: list[StepTime] = field(default_factory=list)
    _trial: _Trial | None = None
    _pauses: dict[int, int] = field(default_factory=dict)
    _failures: dict[int, int] = field(default_factory=dict)

    @property
    def is_window_over(self) -> bool:
        """True if the last step was the last of its window."""
        return not self._steps

    def begin(self) -> None:
        """Begin a generation: nothing measured before it counts."""
        self._steps.clear()
        self._settling = SETTLING_STEPS

    def step(self, time: StepTime, roles: Roles, *, left: int) -> RoleChoice | None:
        """Take over a step that ``roles`` took, with ``left`` more to come; return a due move."""
        self._pauses = {way: steps - 1 for way, steps in self._pauses.items() if steps > 1}
        if self._settling:
            self._settling -= 1
            return None
        if roles != self._roles:
            self._roles = roles
            self._steps.clear()
        self._steps.append(time)
        if len(self._steps) < self.settings.window:
            return None
        shares = Shares.of(self._steps)
        self._steps.clear()
        if (back := self._judged(shares, roles, left=left)) is not None:
            return back
        if (choice := self._best(shares, roles, left=left)) is not None:
            self._trial = _Trial(before=roles, after=choice.roles, step_s=shares.step_s)
        return choice

    def _is_worth(self, gain_s: float, *, left: int) -> bool:
        return gain_s * left >= _WORTH * self.move_s

    def _judged(self, shares: Shares, roles: Roles, *, left: int) -> RoleChoice | None:
        """Judge the last move; return the way back if it cost time."""
        trial, self._trial = self._trial, None
        if trial is None or roles != trial.after:
            return None  # none was made, or something else changed too
        half = self.settings.least_gain / 2
        if shares.step_s <= trial.step_s * (1 - half):
            return None
        way = trial.after.trainers - trial.before.trainers
        failures = self._failures[way] = self._failures.get(way, 0) + 1
        self._pauses[way] = _PAUSE_WINDOWS * self.settings.window << failures
        lost_s = shares.step_s - trial.step_s
        if lost_s < half * trial.step_s or not self._is_worth(lost_s, left=left):
            return None
        return RoleChoice(
            roles=trial.before,
            shares=shares,
            expected_s=trial.step_s,
            reason=(
                f"the last move cost time: {trial.step_s:.3g} s a step before it, "
                f"{shares.step_s:.3g} s since"
            ),
        )

    def _best(self, shares: Shares, roles: Roles, *, left: int) -> RoleChoice | None:
        unit, least = self.shape.unit, self.settings.least_gain
        found: list[RoleChoice] = []
        for way in (unit, -unit):
            then = roles.moved(way)
            if self._pauses.get(way) or not self.shape.allows(then):
                continue
            expected_s = shares.after(roles, then, self.shape)
            gain_s = shares.step_s - expected_s
            if gain_s < least * shares.step_s or not self._is_worth(gain_s, left=left):
                continue
            found.append(
                RoleChoice(
                    roles=then, shares=shares, expected_s=expected_s, reason=_reason(shares, way)
                )
            )
        return min(found, key=lambda choice: choice.expected_s, default=None)


def _reason(shares: Shares, way: int) -> str:
    waits, works = f"{shares.waits:.0%}", f"{shares.works:.0%}"
    if way > 0:
        return f"rollout workers work for {works} of a step, trainers wait for {waits} of it"
    return f"trainers wait for {waits} of a step, rollout workers work for {works} of it"
