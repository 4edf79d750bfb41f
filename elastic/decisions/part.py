"""The part of one agent in a job: it watches all nodes or follows, and may decide for others. Pure.

`decisions.deciding` decides; an `AgentPart` remembers since when. The caller writes, and has the
clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from holdfast.elastic.decisions import deciding
from holdfast.elastic.membership.readiness import living_deciders
from holdfast.elastic.membership.records import Bulletin, Decider, NodeRecord
from holdfast.elastic.membership.view import JobView

_RETRY_S: Final = 0.1
_QUIET_S: Final = 2.0
"""Time without a reason to watch after which an agent follows again."""


class AgentPart:
    """The part of one agent of a job that ``expected`` nodes were started for.

    In a job of more than ``most`` nodes ``places`` agents decide. ``watches`` is true while the
    agent should see the records of all nodes, ``is_crowd`` if the job has deciders.
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

    def choose(
        self,
        view: JobView,
        *,
        own: Callable[[], NodeRecord],
        leaves: bool,
        waits: bool,
        now_s: float,
    ) -> tuple[int | None, float | None]:
        """Set ``watches``; return the free place to claim now, and when to ask again, if at all.

        ``own`` returns the node's record; ``leaves`` and ``waits`` are as in
        `deciding.must_watch`.
        """
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

    def due(
        self, view: JobView, *, fencing: int, halting: int, reason: str, now_s: float
    ) -> tuple[Bulletin | None, float | None]:
        """Return the bulletin that it should publish now, and when to ask again, if at all.

        The arguments are as in `deciding.tell`.
        """
        turn, bulletin = self.turn(view), None
        if turn is not None:
            bulletin = deciding.tell(view, fencing=fencing, halting=halting, reason=reason)
        if turn is None or bulletin is None:
            self._untold = False
            return None, None
        if not self._untold:
            self._untold, self._tell_s = True, now_s + turn * deciding.STAGGER_S
        if now_s < self._tell_s:
            return None, self._tell_s
        self._tell_s = now_s + _RETRY_S
        return bulletin, self._tell_s
