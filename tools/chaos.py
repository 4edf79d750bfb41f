"""Killing parts of a running job on schedule, with SIGKILL, and writing down what was killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence

from elastic.events import EventWriter, events_file
from elastic.launch import Launcher
from elastic.records import TRAINER
from tools.live_state import LiveState
from tools.report.timeline import KILL_NODE, KILL_ROLLOUT
from tools.schedule import Kill, Victim, victims

_FRESH_S = 0.04
"""A rollout worker counts as sampling for this long after it said so; sequences are short."""

_TICK_S = 0.02
_EAGER_TICK_S = 0.002

_KILLS_MOST = 8


class Nemesis:
    """Carries out a schedule of kills against one launched job, driven by `tick`."""

    def __init__(self, launcher: Launcher, plan: Sequence[Kill], *, seed: int, steps: int) -> None:
        self._launcher, self._steps = launcher, steps
        self._plan = list(plan)
        self._draw = random.Random(f"holdfast victims {seed}")
        self._done: list[Kill] = []
        self._due_s: float | None = None
        self._unconfirmed: str | None = None
        self._writer = EventWriter(events_file(launcher.run_dir, "chaos"), node="chaos")
        self.killed_pids: set[int] = set()

    @property
    def pending(self) -> int:
        """How many kills are still to come."""
        return len(self._plan)

    @property
    def tick_s(self) -> float:
        """How long the next `tick` can wait: not at all while a moment is watched for."""
        watching = self._due_s is not None and self._plan[0].kind == KILL_ROLLOUT
        return _EAGER_TICK_S if watching else _TICK_S

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def tick(self, state: LiveState) -> None:
        """Carry out the next kill if its moment has come."""
        self._reconsider(state)
        if not self._plan or state.step < self._plan[0].step or not self._stands(state):
            return
        kill = self._plan[0]
        if self._due_s is None:
            self._due_s = time.monotonic() + kill.delay * state.step_seconds
        if time.monotonic() < self._due_s:
            return
        busy = state.busy(since=time.time() - _FRESH_S)
        choice = victims(kill.kind, state.participants(), busy=busy)
        if not choice:
            return
        victim = self._draw.choice(choice)
        if self._kill(kill.kind, victim, state):
            self._due_s = None
            self._unconfirmed = victim.name if kill.kind == KILL_ROLLOUT else None
            self._done.append(self._plan.pop(0))

    def _reconsider(self, state: LiveState) -> None:
        """Plan a kill again that proves to have hit a worker between two sequences."""
        if self._unconfirmed not in state.salvaged:
            return
        if not state.salvaged[self._unconfirmed] and len(self._done) < _KILLS_MOST:
            self._plan.insert(0, self._done[-1])
        self._unconfirmed = None

    def _stands(self, state: LiveState) -> bool:
        """Whether the job has got over the last kill and can afford the next.

        Roles that are hit need all their workers; near the job's end nothing is waited for.
        """
        if state.unrecovered or state.stepped < state.generation:
            return False
        wanted = self._launcher.config.wanted
        hit = set(wanted) - {TRAINER} if self._plan[0].kind == KILL_ROLLOUT else set(wanted)
        whole = all(state.count(role) >= wanted[role] for role in hit)
        return whole or self._steps - state.step <= 2 * len(self._plan)

    def _kill(self, kind: str, victim: Victim, state: LiveState) -> bool:
        """Kill and record it; False when the victim has gone by itself in the meantime."""
        processes = self._launcher.processes().get(victim.node)
        if processes is None:
            return False
        pids = [state.alive[victim.node][seat] for seat in victim.seats]
        if kind == KILL_NODE:
            pids = [processes.agent, processes.sidecar, *processes.workers.values()]
        now_s = time.time()
        if not _sigkill(pids):
            return False
        self.killed_pids.update(pids)
        fields = {
            "what": kind,
            "victim": victim.name,
            "on": victim.node,
            "pid": pids[0],
            "pids": pids,
            "seats": list(victim.seats),
        }
        self._writer.write("fault", source="chaos", t=now_s, fields=fields)
        return True


def _sigkill(pids: Sequence[int]) -> bool:
    """Kill all that still run, as one blow; tell whether the first did."""
    hit = False
    for at, pid in enumerate(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            hit = hit or at == 0
    return hit
