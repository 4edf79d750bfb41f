"""A token bucket that limits bandwidth. The caller supplies the time. Pure."""

from __future__ import annotations

from typing import Final

BURST_S: Final = 0.05
"""The part of a pause, in seconds, that may be made up for at once."""


class Bucket:
    """Computes the wait after each piece so that no more than ``bytes_per_s`` pass.

    Over any time ``t`` at most ``bytes_per_s * (t + BURST_S)`` and one piece are let through (the
    generic cell rate algorithm, ITU-T I.371). A rate of 0 is no limit.
    """

    def __init__(self, bytes_per_s: int = 0) -> None:
        if bytes_per_s < 0:
            raise ValueError(f"bytes_per_s is {bytes_per_s}: give a rate, or 0 for no limit")
        self.bytes_per_s = bytes_per_s
        self._free_s = float("-inf")

    def pay(self, nbytes: int, *, now_s: float) -> float:
        """Record that ``nbytes`` go at ``now_s``; return the seconds to wait before the next."""
        if not self.bytes_per_s:
            return 0.0
        self._free_s = max(self._free_s, now_s - BURST_S) + nbytes / self.bytes_per_s
        return max(0.0, self._free_s - now_s)
