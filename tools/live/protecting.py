"""The protection of a run: by its nodes' answers, else by its events. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.elastic.events import StepDone, StepProtected
from holdfast.tools.live.view import NodeView, ProtectionView
from holdfast.tools.show.node_status import NodeStatus

_SHOWN: Final = 256


class Protecting:
    """Folds the events that tell of protected steps."""

    def __init__(self) -> None:
        self._newest, self._at_s = (-1, -1), 0.0
        self._seconds: deque[float] = deque(maxlen=_SHOWN)
        self._told_s, self._at_risk_s = 0.0, 0.0

    def protected(self, event: StepProtected) -> None:
        """Take over that a step is protected."""
        self._seconds.append(event.seconds)
        if (event.generation, event.step) >= self._newest:
            self._newest, self._at_s = (event.generation, event.step), event.time_s

    def step(self, event: StepDone) -> None:
        """Take over the newest protected step that a rank knows of."""
        if event.time_s >= self._told_s:
            self._told_s, self._at_risk_s = event.time_s, event.unprotected_s
        if event.protected >= 0 and (event.generation, event.protected) > self._newest:
            self._newest = event.generation, event.protected
            self._at_s = event.time_s - event.unprotected_s

    def view(
        self,
        nodes: Sequence[NodeView],
        answers: Mapping[str, NodeStatus],
        *,
        step: int,
        now_s: float,
    ) -> ProtectionView:
        """Return the view; ``step`` is the newest complete one."""
        answering = [node for node in nodes if node.answered]
        newest = max(
            answering, key=lambda node: (node.generation or 0, node.protected or -1), default=None
        )
        found, told_by = (newest.protected if newest else None), "nodes"
        age_s = newest.age_s if newest else None
        if found is None and self._newest[1] >= 0:
            found, told_by = self._newest[1], "events"
            age_s = max(now_s - self._at_s, 0.0)
        why = [why for each in answers.values() for why in each.unprotected.values()]
        left_out = [str(text) for each in answers.values() if (text := each.memory.get("left_out"))]
        return ProtectionView(
            step=found,
            age_s=age_s,
            at_risk_steps=None if found is None else max(step - found, 0),
            at_risk_s=age_s if told_by == "nodes" else self._at_risk_s,
            told_by=told_by,
            protect_median_s=statistics.median(self._seconds) if self._seconds else None,
            protect_max_s=max(self._seconds, default=None),
            why_not="; ".join(dict.fromkeys([*left_out, *why])),
            slots_bytes=sum(node.slots_bytes for node in answering),
            parity_bytes=sum(node.parity_bytes for node in answering),
            logs_bytes=sum(node.logs_bytes for node in answering),
            disk_bytes=sum(node.disk_bytes for node in answering),
            budget_bytes=sum(node.budget_bytes for node in answering),
        )
