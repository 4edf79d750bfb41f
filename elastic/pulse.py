"""The heartbeat of a worker: what it is doing, told to its agent through shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic.channel import Channel, Phase


class Pulse:
    """Keeps the present step and phase, and beats on every change."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._step, self._phase = channel, 0, Phase.IDLE

    def beat(self) -> None:
        """Say that there is progress."""
        self._channel.beat(step=self._step, phase=self._phase)

    def set(self, phase: Phase, *, step: int | None = None) -> None:
        """Change the phase, and the step when given."""
        self._phase = phase
        if step is not None:
            self._step = step
        self.beat()

    def waiting(self, waits: bool) -> None:
        """Show a wait inside the present phase, or its end."""
        phase = Phase.WAIT if waits else self._phase
        self._channel.beat(step=self._step, phase=phase)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Be in another phase for a while."""
        before = self._phase
        self.set(phase)
        try:
            yield
        finally:
            self.set(before)
