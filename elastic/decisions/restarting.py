"""The decision on whether and when a process that ended is started again. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """The ``count`` of a process's restarts since the job's ``progress`` last grew.

    It is started at ``due_s`` or later, a time of `time.monotonic`.
    """

    count: int = 0
    progress: int = -1
    due_s: float = 0.0


def again(before: Restarts, *, progress: int, most: int, now_s: float) -> Restarts | None:
    """Return the next restart, None after ``most`` in a row without progress."""
    count = 1 if progress > before.progress else before.count + 1
    if count > most:
        return None
    return Restarts(
        count=count, progress=max(progress, before.progress), due_s=now_s + pause_s(count)
    )


def pause_s(count: int) -> float:
    """Return the seconds before restart number ``count`` in a row.

    The first one is at once, each further one after twice the pause of the one before, half a
    minute at most: a cause such as a full memory may need time to pass.
    """
    if count < 2:
        return 0.0
    doublings = min(count - 2, 16)
    return min(_FIRST_PAUSE_S * float(1 << doublings), _LONGEST_PAUSE_S)
