"""The memory page that a worker shares with its agent: heartbeats one way, the fence the other.

Next to the fence is the time until which the node may act. If the agent is stopped, and so can
neither fence nor kill its worker, the worker parks by itself before the node's lease runs out at
the coordinator.

One anonymous file (memfd) per worker; every cell is an aligned 64-bit integer with one writer, so a
read costs nanoseconds, needs no lock, and works in any state of the other side.
"""

from __future__ import annotations

import mmap
import os
import time

from holdfast.elastic.membership.phases import Beat, WorkerPhase
from holdfast.elastic.processes.lifelock import LOCK_BYTES, LifeLock

PAGE_BYTES = 4096
_FENCE, _UNTIL_NS, _LEAVE, _HALT = 0, 1, 2, 3  # cells of the agent
_BEAT, _STEP, _PHASE, _BEAT_NS, _LIMIT_MS, _HELD = 8, 9, 10, 11, 12, 13  # and of the worker
_LIFE_AT = PAGE_BYTES - LOCK_BYTES

EVERY_GENERATION = (1 << 63) - 1
"""The fence that ends all generations: the job is over for this worker."""


class ControlPage:
    """A mapping of the page; the agent creates it, the worker attaches to the inherited fd."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._cells = memoryview(self._map).cast("q")
        self._life = LifeLock(self._map, _LIFE_AT)

    @classmethod
    def create(cls, name: str) -> ControlPage:
        """Make a zeroed page; ``name`` only shows in ``/proc``."""
        fd = os.memfd_create(f"holdfast-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        page = cls(fd)
        page._life.prepare()
        return page

    @property
    def fence(self) -> int:
        """The newest generation that is over for this worker."""
        return self._cells[_FENCE]

    def set_fence(self, generation: int) -> None:
        """End ``generation`` and all before it (agent only; never goes back)."""
        self._cells[_FENCE] = max(generation, self._cells[_FENCE])

    @property
    def expired(self) -> bool:
        """True if the time until which the node may act is over; the agent may be stopped."""
        until_ns = self._cells[_UNTIL_NS]
        return 0 < until_ns < time.monotonic_ns()

    def extend(self, until_ns: int) -> None:
        """Let the worker act until ``until_ns`` on the monotonic clock (agent only)."""
        self._cells[_UNTIL_NS] = until_ns

    @property
    def leaving(self) -> bool:
        """True if the node must leave the job at the next step."""
        return bool(self._cells[_LEAVE])

    def set_leaving(self) -> None:
        """Request a hand-over at the next step (agent only)."""
        self._cells[_LEAVE] = 1

    def halts(self, generation: int) -> bool:
        """Return whether the trainers of a generation must halt at the end of their step."""
        return self._cells[_HALT] == generation

    def set_halt(self, generation: int) -> None:
        """Request a halt at the end of the worker's step in ``generation`` (agent only)."""
        self._cells[_HALT] = generation

    def beat(self, *, step: int, phase: WorkerPhase, limit_s: float = 0.0) -> None:
        """Record a heartbeat (worker only)."""
        self._cells[_STEP] = step
        self._cells[_PHASE] = phase
        self._cells[_LIMIT_MS] = int(limit_s * 1000)
        self._cells[_BEAT_NS] = time.monotonic_ns()
        self._cells[_BEAT] += 1

    def last_beat(self) -> Beat:
        """Return the newest heartbeat; ``count`` 0 means none yet."""
        return Beat(
            count=self._cells[_BEAT],
            step=self._cells[_STEP],
            phase=WorkerPhase(self._cells[_PHASE]),
            at_ns=self._cells[_BEAT_NS],
            limit_s=self._cells[_LIMIT_MS] / 1000,
        )

    def hold_life(self) -> None:
        """Let the agent detect at once when the calling thread ends (worker only)."""
        if self._life.hold():
            self._cells[_HELD] = 1

    @property
    def life_is_held(self) -> bool:
        """True if `await_end` can wait for the worker's end."""
        return bool(self._cells[_HELD])

    def await_end(self) -> bool:
        """Wait until the worker's thread has ended, without the interpreter lock (agent only).

        The page must not be closed meanwhile.
        """
        return self._life.await_end()

    def close(self) -> None:
        """Unmap and close."""
        self._cells.release()
        self._map.close()
        os.close(self.fd)
