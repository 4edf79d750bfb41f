"""The page of memory a worker shares with its agent: heartbeats one way, the fence the other.

One anonymous file (memfd) per worker; every cell is an aligned 64-bit integer with one writer,
so a read costs nanoseconds, needs no lock, and works whatever the other side is doing.
"""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum

import msgspec

PAGE_BYTES = 4096
_FENCE, _BEAT, _STEP, _PHASE, _BEAT_NS = 0, 8, 9, 10, 11  # cells; the writers' lines apart

EVERY_GENERATION = (1 << 63) - 1
"""The fence that ends all generations: the job is over for this worker."""


class Phase(IntEnum):
    """What a worker is doing: only COMPUTE promises a next heartbeat soon."""

    IDLE = 0
    COMPUTE = 1
    WAIT = 2


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The last heartbeat of a worker; ``at_ns`` is on its machine's monotonic clock."""

    count: int
    step: int
    phase: Phase
    at_ns: int


class ControlPage:
    """A mapping of the page; the agent creates it, the worker attaches to the inherited fd."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._cells = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, name: str) -> ControlPage:
        """Make a zeroed page; ``name`` only shows in ``/proc``."""
        fd = os.memfd_create(f"holdfast-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        return cls(fd)

    @property
    def fence(self) -> int:
        """The newest generation that is over for this worker."""
        return self._cells[_FENCE]

    def set_fence(self, generation: int) -> None:
        """End ``generation`` and all before it (agent only; never goes back)."""
        self._cells[_FENCE] = max(generation, self._cells[_FENCE])

    def beat(self, *, step: int, phase: Phase) -> None:
        """Record a heartbeat (worker only)."""
        self._cells[_STEP] = step
        self._cells[_PHASE] = phase
        self._cells[_BEAT_NS] = time.monotonic_ns()
        self._cells[_BEAT] += 1

    def last_beat(self) -> Beat:
        """Return the newest heartbeat; ``count`` 0 means none yet."""
        return Beat(
            count=self._cells[_BEAT],
            step=self._cells[_STEP],
            phase=Phase(self._cells[_PHASE]),
            at_ns=self._cells[_BEAT_NS],
        )

    def close(self) -> None:
        """Unmap and close."""
        self._cells.release()
        self._map.close()
        os.close(self.fd)
