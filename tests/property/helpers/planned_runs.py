"""A planned job, lived through failure by failure: what the plan's formulas are compared with.

It knows nothing of rates of loss or expected times. Nodes fail at random times; a snapshot counts
once it is protected; more losses than parity makes good lead back to a checkpoint.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from holdfast.tools.plan.forecast import Intervals
from holdfast.tools.plan.job import PlannedJob


@dataclass(kw_only=True)
class LivedRun:
    """The wall time, the useful time and the numbers of failures of a run."""

    job: PlannedJob
    intervals: Intervals
    random: random.Random
    now_s: float = 0.0
    soft: int = 0
    hard: int = 0
    _done: int = 0
    _protected: int = 0
    _stored: int = 0
    _lost: set[int] = field(default_factory=set)
    _due_s: float = 0.0
    _waiting: list[tuple[float, int, bool]] = field(default_factory=list)

    def live(self, steps: int) -> None:
        """Do so many useful steps, in whole intervals."""
        job, every = self.job, self.intervals.snapshot
        self._due_s = self._next()
        span_s = every * job.step_s + job.snapshot_s
        while self._done < steps:
            stores = (self._done + every) % self.intervals.checkpoint == 0
            end_s = self.now_s + span_s + (job.checkpoint_s if stores else 0.0)
            if self._due_s < end_s:
                self._fail()
                continue
            self.now_s = end_s
            self._done += every
            self._waiting.append((end_s + job.protection_s, self._done, False))
            if stores:
                self._waiting.append((end_s + job.persist_s, self._done, True))

    def _next(self) -> float:
        return self.now_s + self.random.expovariate(self.job.nodes / self.job.node_mtbf_s)

    def _settle(self) -> None:
        """Count what was protected or stored by now."""
        for at_s, steps, stored in self._waiting:
            if at_s <= self.now_s and stored:
                self._stored = max(self._stored, steps)
            elif at_s <= self.now_s and steps > self._protected:
                self._protected = steps
                self._lost.clear()  # the survivors protected a step among themselves
        self._waiting = [each for each in self._waiting if each[0] > self.now_s]

    def _fail(self) -> None:
        """Lose a node at the time that is due, and again while the way back takes its time."""
        job = self.job
        while True:
            self.now_s = self._due_s
            self._settle()
            self._waiting.clear()
            self._lost.add(self.random.randrange(job.nodes))
            if fatal := self._is_lost():
                self.hard += 1
                self._done = self._protected = self._stored
                self._lost.clear()
            else:
                self.soft += 1
                self._done = self._protected
            back_s = self.now_s + (job.reload_s if fatal else job.return_s)
            self._due_s = self._next()
            if self._due_s >= back_s:
                self.now_s = back_s
                return

    def _is_lost(self) -> bool:
        job = self.job
        groups: dict[int, list[int]] = {}
        for node in self._lost:
            groups.setdefault(node // job.group, []).append(node % job.group)
        if job.parity == "replicate":  # the copy of each is on the next of its group
            return any((at + 1) % job.group in held for held in groups.values() for at in held)
        return any(len(held) > job.parity for held in groups.values())
