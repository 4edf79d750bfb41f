"""What a worker is doing, as its heartbeat says. Pure."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class WorkerPhase(IntEnum):
    """What a worker is doing: only COMPUTE promises a next heartbeat soon.

    PAUSE is work beside training that the loop announced, as an evaluation; MEET is waiting for
    the other ranks in the middle of a step, or before the first one, which cannot be all that any
    rank does.
    """

    IDLE = 0
    COMPUTE = 1
    WAIT = 2
    PAUSE = 3
    MEET = 4


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The last heartbeat of a worker; ``at_ns`` is on its machine's monotonic clock.

    ``limit_s`` is how long it says that it may be silent now, 0 where it says nothing.
    """

    count: int
    step: int
    phase: WorkerPhase
    at_ns: int
    limit_s: float = 0.0
