"""Rank 0's part in the balance: it times its steps and asks for other numbers of workers.

The agents follow an ask of the newest generation if no other change is under way
(`elastic.decisions.moving`). So rank 0 asks anew after every window of steps, and takes back what
it no longer wants.
"""

from __future__ import annotations

from collections import Counter, deque
from statistics import median
from typing import Final

from holdfast import elastic
from holdfast.adapters.rl.balance.choosing import Balancer, RoleChoice, Roles, StepTime
from holdfast.elastic.events import RolesAsked
from holdfast.elastic.membership.records import TRAINER, WorkerState
from holdfast.elastic.membership.view import role_of

_AT_WORK: Final = (WorkerState.READY, WorkerState.ACTIVE)
_CHANGES: Final = 5


class RoleBalance:
    """Times the steps of a trainer process, as long as it is rank 0, and asks for moves.

    ``role`` is the role of the workers that sample.
    """

    def __init__(self, balancer: Balancer, *, role: str) -> None:
        self._balancer, self._role = balancer, role
        self._session: elastic.Session | None = None
        self._is_first = True
        self._last_s: float | None = None
        self._changes_s: deque[float] = deque(maxlen=_CHANGES)
        self._asked = False
        self._most = 0

    def begin(self, session: elastic.Session) -> None:
        """Begin a generation in which this process is rank 0."""
        self._session, self._asked, self._is_first = session, False, True
        self._balancer.begin()

    def step(self, *, now_s: float, waited_s: float, working: float, left: int) -> None:
        """Take over that rank 0 has the samples of a step at ``now_s``, of a monotonic clock.

        It waited ``waited_s`` for them. ``working`` is the share of the rollout workers' time since
        the step before in which they had something to do; ``left`` is the number of steps to come.
        """
        seconds = now_s - (now_s if self._last_s is None else self._last_s)
        is_first, self._is_first, self._last_s = self._is_first, False, now_s
        if is_first:
            self._note_change(seconds)
            return
        roles = self._roles()
        if roles is None:
            return
        time = StepTime(seconds=seconds, waited_s=waited_s, working=working)
        if (choice := self._balancer.step(time, roles, left=left)) is not None:
            self._ask(choice)
        elif self._asked and self._balancer.is_window_over:
            self._withdraw()

    def _note_change(self, seconds: float) -> None:
        """Learn from the first step of a generation how long the change took."""
        if seconds:
            self._changes_s.append(seconds)
            self._balancer.move_s = median(self._changes_s)

    def _roles(self) -> Roles | None:
        """Return the numbers of workers at work, None while one is missing or none samples."""
        found = Counter(
            role_of(worker.seat)
            for node in (self._session.roster().nodes if self._session else ())
            for worker in node.workers
            if worker.state in _AT_WORK
        )
        self._most = max(self._most, found.total())
        if found.total() < self._most or not found[self._role]:
            return None
        return Roles(trainers=found[TRAINER], rollouts=found[self._role])

    def _ask(self, choice: RoleChoice) -> None:
        shares = choice.shares
        self._asked = True
        self._emit(
            RolesAsked(
                roles={TRAINER: choice.roles.trainers, self._role: choice.roles.rollouts},
                reason=choice.reason,
                waits=round(shares.waits, 4),
                works=round(shares.works, 4),
                step_s=round(shares.step_s, 6),
                expected_s=round(choice.expected_s, 6),
            )
        )

    def _withdraw(self) -> None:
        self._asked = False
        self._emit(RolesAsked(roles={}, reason="the shares no longer call for a move"))

    def _emit(self, event: RolesAsked) -> None:
        if self._session is not None:
            self._session.emit(event)
