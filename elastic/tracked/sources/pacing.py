"""The progress of a long read, told now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_EVERY_S: Final = 10.0


class Pacing:
    """Hands on the progress of a read, with the seconds since it began, every ``every_s``.

    A read that is over before that, and the end of any, is not told. ``tell`` gets the bytes that
    are in place, all bytes, and the seconds.
    """

    def __init__(
        self,
        tell: Callable[[int, int, float], None],
        *,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell, self._every_s, self._clock = tell, every_s, clock
        self._began_s = self._told_s = clock()

    def __call__(self, done: int, total: int) -> None:
        """Take note of ``done`` of ``total`` bytes."""
        now_s = self._clock()
        if done and done < total and now_s >= self._told_s + self._every_s:
            self._told_s = now_s
            self._tell(done, total, now_s - self._began_s)
