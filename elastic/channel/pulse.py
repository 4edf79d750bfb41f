"""The heartbeat of a worker: its phase and step, shown to its agent through shared memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.elastic.channel.base import Channel, WorkerPhase


class Pulse:
    """Keeps the present step and phase, beats on every change, and measures silences."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._step, self._phase = channel, 0, WorkerPhase.IDLE
        self._limit_s = 0.0
        self._shown, self._shown_s, self._quiet_s = WorkerPhase.IDLE, 0.0, 0.0

    def beat(self) -> None:
        """Show progress."""
        self._show(self._phase)

    def _show(self, phase: WorkerPhase) -> None:
        now_s = time.monotonic()
        if self._shown is WorkerPhase.COMPUTE:
            self._quiet_s = max(self._quiet_s, now_s - self._shown_s)
        self._shown, self._shown_s = phase, now_s
        limit_s = self._limit_s if phase is WorkerPhase.PAUSE else 0.0
        self._channel.beat(step=self._step, phase=phase, limit_s=limit_s)

    def take_quiet_s(self) -> float:
        """Return the longest time without a beat while computing since the last call."""
        quiet_s, self._quiet_s = self._quiet_s, 0.0
        return quiet_s

    def set(self, phase: WorkerPhase, *, step: int | None = None) -> None:
        """Change the phase, and the step when given."""
        self._phase = phase
        if step is not None:
            self._step = step
        self.beat()

    def waiting(self, waits: bool) -> None:
        """Show a wait for other ranks inside the present phase, or its end.

        While the group forms or the state is restored, such a wait is shown as MEET, as in a step:
        some rank is always at work, unless ranks cannot reach each other.
        """
        meets = (
            WorkerPhase.MEET
            if self._phase in (WorkerPhase.COMPUTE, WorkerPhase.IDLE)
            else WorkerPhase.WAIT
        )
        self._show(meets if waits else self._phase)

    @contextmanager
    def phase(self, phase: WorkerPhase, *, limit_s: float = 0.0) -> Iterator[None]:
        """Enter another phase for the body; in PAUSE, ``limit_s`` is the longest silence.

        With 0 the agent's own limit applies.
        """
        before, before_s = self._phase, self._limit_s
        self._limit_s = limit_s
        self.set(phase)
        try:
            yield
        finally:
            self._limit_s = before_s
            self.set(before)
