"""The part of one agent in a job: it watches all nodes or follows, and may decide for others. Pure.

`decisions.agree` and `decisions.deciding` decide; an `AgentPart` remembers since when, and what the
node has begun. The caller writes, and has the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.elastic.decisions import agree, deciding
from holdfast.elastic.membership.readiness import living_deciders
from holdfast.elastic.membership.records import Bulletin, Decider, NodeRecord
from holdfast.elastic.membership.view import JobView

_RETRY_S: Final = 0.1
_QUIET_S: Final = 2.0
"""Time without a reason to watch after which an agent follows again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Compare-and-set ``decider`` into a free place, under the agent's lease."""

    place: int
    decider: Decider


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Compare-and-set ``bulletin`` as the newest one against revision ``expected``."""

    bulletin: Bulletin
    expected: int


Move = Claim | Tell | None


class AgentPart:
    """The part of one agent of a job that ``expected`` nodes were started for.

    In a job of more than ``most`` nodes ``places`` agents decide. ``watches`` is true while the
    agent should see the records of all nodes, ``is_crowd`` if the job has deciders.

    ``fencing`` is the newest generation that the node fences or has fenced, ``halting`` the one
    whose trainers it halts, ``standing`` the one whose trainers have halted; 0 for none.
    """

    def __init__(
        self,
        node: str,
        *,
        incarnation: str,
        expected: int,
        most: int = deciding.MOST_WATCHERS,
        places: int = deciding.PLACES,
    ) -> None:
        self._node, self._expected, self._most, self._places = node, expected, most, places
        self.decider = Decider(node=node, incarnation=incarnation)
        self.fencing = self.halting = self.standing = 0
        self._why = ""
        self._seen = agree.FirstSeen()
        self._free = deciding.FreePlaces(since={})
        self._needed_s = self._tell_s = self._claim_s = 0.0
        self._untold = False
        self.watches = expected <= most
        self.is_crowd = not self.watches

    def turn(self, view: JobView) -> int | None:
        """Return the agent's turn among the deciders, None if it is none."""
        return deciding.turn_of(view, self.decider.incarnation)

    def decides(self, view: JobView) -> bool:
        """Return whether the agent, if it watches, seats workers and proposes generations."""
        return not living_deciders(view) or self.turn(view) is not None

    def speaks(self, view: JobView) -> bool:
        """Return whether this node reports events that all see who watch."""
        if living_deciders(view):
            return self.turn(view) == 0
        return min(view.nodes, default="") == self._node

    def begin_fence(self, generation: int, reason: str) -> bool:
        """Note that the node fences a generation; return False if it fences that or a newer one."""
        if generation <= self.fencing:
            return False
        self.fencing, self._why = generation, reason
        return True

    def begin_halt(self, generation: int, reason: str) -> None:
        """Note that the node makes the trainers of a generation halt."""
        self.halting, self._why = generation, reason

    def decide(
        self,
        view: JobView,
        *,
        own: Callable[[], NodeRecord],
        follows: bool,
        now_s: float,
        step_s: float = agree.STEP_S,
    ) -> tuple[agree.Decision, str]:
        """Return the agent's decision about the newest generation, and the reason.

        ``follows``: ``view`` is that of a follower. ``own`` returns the node's record; ``step_s``
        is as in `agree.decide`.
        """
        stand = self.standing == view.number > 0
        if follows:
            return deciding.follow(view, own=own(), stand=stand)
        self._seen = agree.observe(view, self._seen, now_s=now_s)
        return agree.decide(
            view, self._seen, node=self._node, now_s=now_s, stand=stand, step_s=step_s
        )

    def next_move(
        self,
        view: JobView,
        *,
        own: Callable[[], NodeRecord],
        follows: bool,
        leaves: bool,
        waits: bool,
        now_s: float,
    ) -> tuple[Move, float | None]:
        """Set ``watches``; return the write that is due now, and when to ask again, if at all.

        ``follows``: ``view`` is that of a follower. ``own`` returns the node's record; ``leaves``
        and ``waits`` are as in `deciding.must_watch`.
        """
        place, again_s = self._choose(view, own=own, leaves=leaves, waits=waits, now_s=now_s)
        turn, bulletin = self.turn(view), None
        if turn is not None and not follows:
            bulletin = deciding.tell(
                view, fencing=self.fencing, halting=self.halting, reason=self._why
            )
        if turn is None or bulletin is None:
            self._untold = False
            claim = None if place is None else Claim(place=place, decider=self.decider)
            return claim, again_s
        if not self._untold:
            self._untold, self._tell_s = True, now_s + turn * deciding.STAGGER_S
        if now_s < self._tell_s:
            return None, self._tell_s
        self._tell_s = now_s + _RETRY_S
        return Tell(bulletin=bulletin, expected=view.bulletin_revision), self._tell_s

    def _choose(
        self,
        view: JobView,
        *,
        own: Callable[[], NodeRecord],
        leaves: bool,
        waits: bool,
        now_s: float,
    ) -> tuple[int | None, float | None]:
        """Set ``watches``; return the free place to claim now, and when to ask again, if at all."""
        self.is_crowd = deciding.is_crowd(view, expected=self._expected, most=self._most)
        if not self.is_crowd:
            self.watches = True
            return None, None
        held = self.turn(view) is not None
        alone = self.watches and not view.deciders
        if held or alone or deciding.must_watch(view, own=own(), leaves=leaves, waits=waits):
            self.watches, self._needed_s = True, now_s
        elif now_s >= self._needed_s + _QUIET_S:
            self.watches = False
        place, again_s = self._claim(view, now_s=now_s)
        if self.watches and not held:
            quiet_s = max(self._needed_s, now_s) + _QUIET_S
            again_s = quiet_s if again_s is None else min(again_s, quiet_s)
        return place, again_s

    def _claim(self, view: JobView, *, now_s: float) -> tuple[int | None, float | None]:
        self._free = self._free.observe(view, now_s=now_s, places=self._places)
        place, again_s = deciding.claim(
            view,
            self._free,
            node=self._node,
            incarnation=self.decider.incarnation,
            now_s=now_s,
            expected=self._expected,
        )
        if place is None:
            return None, again_s
        if now_s < self._claim_s:
            return None, self._claim_s
        self._claim_s = now_s + _RETRY_S
        return place, self._claim_s
