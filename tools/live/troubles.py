"""Faults, losses, stragglers and roll-backs of a run: the newest, and exact counts. Pure."""

from __future__ import annotations

from typing import Final

from holdfast.elastic.events import (
    Detected,
    Event,
    FaultInjected,
    LossJudged,
    StragglerFound,
    StragglerOver,
)
from holdfast.tools.live.generations import Disturbances, of_trainers
from holdfast.tools.live.newest import Newest
from holdfast.tools.live.view import FaultView, StragglerView

_MOST: Final = 512
_HARMLESS: Final = ("join", "notice", "sidecar_exit")
"""Training goes on after these."""

_STRAGGLERS_SHOWN: Final = 32
_SAME_S: Final = 5
"""Several nodes notice one loss; what they tell within this time is the same."""


class Troubles:
    """Folds the events that tell what went wrong."""

    def __init__(self) -> None:
        self.losses = 0
        self._detections = Newest[Detected](_MOST)
        self._faults = Newest[FaultInjected](_MOST)
        self._rollbacks = Newest[float](_MOST)
        self._stragglers = Newest[StragglerFound](_MOST)
        self._over: dict[str, float] = {}

    def apply(self, event: Event) -> None:
        """Take over an event of any kind."""
        match event:
            case Detected(what=what):
                self._detections.add(event.time_s, event)
                self.losses += what != "join"
            case FaultInjected():
                self._faults.add(event.time_s, event)
            case LossJudged(action="rollback"):
                self._rollbacks.add(event.time_s, event.time_s)
            case StragglerFound():
                self._stragglers.add(event.time_s, event)
            case StragglerOver(victim=victim):
                self._over[victim] = max(self._over.get(victim, 0.0), event.time_s)

    def disturbances(self) -> Disturbances:
        """Return the newest of what may change the membership, oldest first."""
        return Disturbances(
            detections=self._detections.in_order(),
            faults=self._faults.in_order(),
            rollbacks=self._rollbacks.in_order(),
        )

    def stopped_s(self) -> float:
        """Return the time of the newest loss of a trainer or a node, which stops the training."""
        return max(
            (
                each.time_s
                for each in self._detections.in_order()
                if each.what not in _HARMLESS and of_trainers(each.victim)
            ),
            default=0.0,
        )

    def fault_views(self) -> tuple[FaultView, ...]:
        """Return faults and losses, the newest first; a loss that several nodes told is one."""
        found = [
            FaultView(
                at_s=each.time_s, what=each.what, victim=each.victim, node=each.on, injected=True
            )
            for each in self._faults.in_order()
        ]
        seen: dict[tuple[str, str], float] = {}
        for each in self._detections.in_order():
            key = (each.what, each.victim)
            if each.what == "join" or each.time_s - seen.get(key, -_SAME_S) < _SAME_S:
                continue
            seen[key] = each.time_s
            found.append(
                FaultView(
                    at_s=each.time_s,
                    what=each.what,
                    victim=each.victim,
                    node=each.node,
                    injected=False,
                    why=each.why,
                )
            )
        return tuple(sorted(found, key=lambda fault: -fault.at_s)[:_MOST])

    def straggler_views(self) -> tuple[StragglerView, ...]:
        """Return the stragglers, the newest first."""
        return tuple(
            StragglerView(
                seat=each.victim,
                node=each.on,
                at_s=each.time_s,
                times=each.times,
                why=each.why,
                over_s=self._over_s(each),
            )
            for each in reversed(self._stragglers.in_order()[-_STRAGGLERS_SHOWN:])
        )

    def _over_s(self, found: StragglerFound) -> float | None:
        over_s = self._over.get(found.victim, 0.0)
        return over_s if over_s > found.time_s else None
