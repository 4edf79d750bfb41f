"""The parts of a ledger that giving out work and taking samples have in common. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.adapters.rl.ledger.borrowing import Borrowing
from holdfast.adapters.rl.ledger.budget import Pressure, TokenBudget, pressure
from holdfast.adapters.rl.ledger.claim_order import Lengths, remaining
from holdfast.adapters.rl.ledger.counters import Books, Counters
from holdfast.adapters.rl.ledger.cuts import GenerationCuts
from holdfast.adapters.rl.ledger.group import Group
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import BatchPlan
from holdfast.adapters.rl.ledger.replay import Replay
from holdfast.adapters.rl.ledger.taking import ByPrompt, ByReward, Taking
from holdfast.adapters.rl.ledger.work.by_arrival import ByArrival
from holdfast.adapters.rl.ledger.work.open_groups import OpenGroups
from holdfast.adapters.rl.ledger.work.waiting import (
    Remaining,
    Waiting,
    WaitingByArrival,
    WaitingByRank,
)
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.ckpt.errors import ArgumentError

_RECORDED_STEPS: Final = 64
_CONFLICTS_KEPT: Final = 100


class LedgerHoldings:
    """The open groups, the limits and the counters of a ledger; for its arguments see `Ledger`."""

    def __init__(
        self,
        plan: BatchPlan,
        *,
        policies: Sequence[str] = ("",),
        reward_of: Callable[[Trajectory], float] | None = None,
    ) -> None:
        if plan.skips and reward_of is None:
            raise ArgumentError(
                f"skip_equal={plan.scheduling.skip_equal} needs the rewards of samples before they "
                "are trained on: set it to None"
            )
        self.plan, self._reward_of = plan, reward_of
        self.books = Books(policies)
        self.counters = Counters()
        self.trained_steps = 0
        self.staleness_max = 0
        self._admitted = 0
        self._cuts = GenerationCuts()
        self._conflicts: list[str] = []
        self._prompt_of: Callable[[int], Tokens] | None = None
        self._unjudged: list[int] = []
        self._replay = Replay(plan.replay, count=plan.replay.reused(plan.groups))
        self._taken: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=_RECORDED_STEPS)
        self._budget = TokenBudget(limit=plan.scheduling.token_budget)
        self._lengths = Lengths()
        by_length = plan.scheduling.claims == "longest"
        self._taking, waiting = _taking(plan, self._remaining if by_length else None)
        self._groups = OpenGroups(size=plan.group, waiting=waiting)
        self.borrowing = Borrowing()

    @property
    def held_tokens(self) -> int:
        """Tokens of all finished and partial samples that wait to be continued or trained."""
        return self._groups.held_tokens

    @property
    def pressure(self) -> Pressure:
        """The limit that restricts new work to what the next step waits for, if any."""
        most = self.plan.scheduling.ledger_tokens
        return pressure(self._budget, held_tokens=self.held_tokens, most=most)

    def allowance(self, workers: int) -> int | None:
        """Return how many tokens each of ``workers`` may sample before it asks again."""
        return self._budget.share(workers)

    def awaited(self) -> set[int]:
        """Return the incomplete ordinals that the next step waits for."""
        return self._taking.awaited()

    def current(self, *, generation: int, version: int) -> bool:
        """Say whether weights ``version`` pulled in ``generation`` belong to the run's history."""
        return self._cuts.current(generation=generation, version=version)

    def valid(self, trajectory: Trajectory) -> bool:
        """Say whether every token was sampled by a version in the run's history."""
        return self._cuts.valid(trajectory)

    # -- inside ------------------------------------------------------------------------------

    def _note(self, violations: Sequence[str]) -> None:
        """Keep violations, the first ones of a job: they are part of every snapshot."""
        self._conflicts += violations[: _CONFLICTS_KEPT - len(self._conflicts)]

    def _remaining(self, group: Group, sample: int) -> float:
        """Return how many tokens a waiting sample is likely to need."""
        limits = self.plan.limits
        most = min(limits.max_new_tokens, limits.context - len(group.prompt))
        return remaining(
            self._lengths.expected(len(group.prompt), most=most),
            done=[each.sampled for each in group.done.values()],
            have=group.partial[sample].sampled if sample in group.partial else 0,
            most=most,
        )

    def _has_room(self, ordinal: int, oldest: int | None) -> bool:
        has_room = self._taking.has_room(ordinal, oldest)
        self.counters.samples_too_old += not has_room
        return has_room

    def _charge(self, group: Group, sample: int, count: int) -> None:
        more = count - group.charged.get(sample, 0)
        if more > 0:
            group.charged[sample] = count
            self._budget.charge(more)


def _taking(plan: BatchPlan, remaining: Remaining | None) -> tuple[Taking, Waiting]:
    """Return the choice of groups that fits a plan, and the order of its waiting samples."""
    if plan.scheduling.order == GroupOrder.ARRIVAL:
        arrival = ByArrival(groups=plan.fresh, eta=plan.eta)
        return arrival, WaitingByArrival(arrival, remaining)
    taking = (ByReward if plan.skips else ByPrompt)(groups=plan.fresh, eta=plan.eta)
    return taking, WaitingByRank(taking, remaining, pinned=plan.pinned)
