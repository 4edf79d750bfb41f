"""The decision on whether and when a node's agent is started again. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """The ``count`` of an agent's restarts since the job's ``progress`` last grew.

    The agent is started at ``due_s`` or later, a time of `time.monotonic`.
    """

    count: int = 0
    progress: int = -1
    due_s: float = 0.0


def again(before: Restarts, *, progress: int, most: int, now_s: float) -> Restarts | None:
    """Return the next restart, None after ``most`` in a row without progress.

    The first one is at once, each further one after twice the pause of the one before, half a
    minute at most: what ends every agent, such as a full memory, may need time to pass.
    """
    count = 1 if progress > before.progress else before.count + 1
    if count > most:
        return None
    pause_s = _FIRST_PAUSE_S * 2 ** (count - 2) if count > 1 else 0.0
    return Restarts(
        count=count,
        progress=max(progress, before.progress),
        due_s=now_s + min(pause_s, _LONGEST_PAUSE_S),
    )
