"""Kill parts of a running job with SIGKILL on schedule, and record each kill as an event."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.elastic.events import FaultInjected
from holdfast.elastic.events.log import EventWriter, events_file
from holdfast.elastic.launch.local import Launcher
from holdfast.elastic.membership.records import TRAINER
from holdfast.tools.demo.schedule import Kill, KillTarget, victims
from holdfast.tools.report.timeline import KILL_NODE, KILL_ROLLOUT
from holdfast.tools.show.live_state import LiveState

_FRESH_S = 0.04
"""A rollout worker counts as sampling for this long after its report; sequences are short."""

_TICK_S = 0.02
_EAGER_TICK_S = 0.002

_KILLS_MOST = 8
_HOLD_MOST_S = 60.0


class ScheduledKills:
    """Carries out a schedule of kills against one launched job, driven by `tick`.

    If a kill is due and the successor of an earlier victim has not joined yet, ``hold_file`` holds
    the job. Otherwise a fast job could end before a new process has started.
    """

    def __init__(
        self, launcher: Launcher, plan: Sequence[Kill], *, seed: int, hold_file: Path
    ) -> None:
        self._launcher, self._plan = launcher, list(plan)
        self._hold_file, self._held_s = hold_file, 0.0
        self._draw = random.Random(f"holdfast victims {seed}")
        self._done: list[Kill] = []
        self._due_s: float | None = None
        self._unconfirmed: str | None = None
        self._writer = EventWriter(events_file(launcher.run_dir, "chaos"), node="chaos")
        self.killed_pids: set[int] = set()

    @property
    def pending(self) -> int:
        """Number of kills still to come."""
        return len(self._plan)

    @property
    def tick_s(self) -> float:
        """Time until the next `tick`; very short while a busy rollout worker is awaited."""
        watching = self._due_s is not None and self._plan[0].kind == KILL_ROLLOUT
        return _EAGER_TICK_S if watching else _TICK_S

    def close(self) -> None:
        """Release the job and close the event file."""
        self._hold(False)
        self._writer.close()

    def tick(self, state: LiveState) -> None:
        """Carry out the next kill if it is due and a victim is available."""
        self._reconsider(state)
        due = bool(self._plan) and state.step >= self._plan[0].step
        going = not state.unrecovered and state.stepped >= state.generation
        whole = due and self._whole(state)
        self._hold(due and going and not whole)
        if not (going and whole):
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

    def _whole(self, state: LiveState) -> bool:
        """True if the roles that the next kill hits have all their workers."""
        wanted = self._launcher.config.wanted
        hit = set(wanted) - {TRAINER} if self._plan[0].kind == KILL_ROLLOUT else set(wanted)
        return all(state.count(role) >= wanted[role] for role in hit)

    def _hold(self, wanted: bool) -> None:
        """Hold the job or release it; hold it no longer than a process may take to start."""
        now_s = time.monotonic()
        if not wanted:
            self._held_s = 0.0
            self._hold_file.unlink(missing_ok=True)
        elif not self._held_s:
            self._held_s = now_s
            self._hold_file.touch()
        elif now_s - self._held_s > _HOLD_MOST_S:
            self._hold_file.unlink(missing_ok=True)

    def _reconsider(self, state: LiveState) -> None:
        """Plan a kill again if it turns out that the worker was between two sequences."""
        if self._unconfirmed not in state.salvaged:
            return
        if not state.salvaged[self._unconfirmed] and len(self._done) < _KILLS_MOST:
            self._plan.insert(0, self._done[-1])
        self._unconfirmed = None

    def _kill(self, kind: str, victim: KillTarget, state: LiveState) -> bool:
        """Kill the victim and record it; return False if the victim has already ended by itself."""
        now_s = time.time()
        if kind == KILL_NODE:
            pids = self._launcher.lose_machine(victim.node)
        else:
            pids = [state.alive[victim.node][seat] for seat in victim.seats]
            if not _sigkill(pids):
                return False
        if not pids:
            return False
        self.killed_pids.update(pids)
        fault = FaultInjected(
            time_s=now_s,
            what=kind,
            victim=victim.name,
            on=victim.node,
            pids=tuple(pids),
            seats=tuple(victim.seats),
        )
        self._writer.write(fault, source="chaos")
        return True


def _sigkill(pids: Sequence[int]) -> bool:
    """Kill all processes that still run, at once; return whether the first one did."""
    hit = False
    for at, pid in enumerate(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            hit = hit or at == 0
    return hit
