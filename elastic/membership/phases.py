"""The phases of a worker, as its heartbeat shows them. Pure."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class WorkerPhase(IntEnum):
    """The phase of a worker; only COMPUTE promises a next heartbeat soon.

    PAUSE is work besides training that the loop announced, such as an evaluation. MEET is waiting
    for other ranks in the middle of a step or before the first one; it is impossible for all ranks
    at once unless something is wrong.
    """

    IDLE = 0
    COMPUTE = 1
    WAIT = 2
    PAUSE = 3
    MEET = 4


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The last heartbeat of a worker; ``at_ns`` is on its machine's monotonic clock.

    ``limit_s`` is the silence that it announces now, 0 if it announces none.
    """

    count: int
    step: int
    phase: WorkerPhase
    at_ns: int
    limit_s: float = 0.0
