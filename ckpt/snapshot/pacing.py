"""A controller of the copy's speed, so that training slows least. Pure: no clock, no thread.

The copy of a snapshot may take from the call until the next optimizer step. At full speed it takes
memory bandwidth from the forward pass; too slow, it makes training wait. The controller spreads it
over a share of the expected window. The share shrinks at once when training had to wait, and grows
back slowly (additive increase, multiplicative decrease).

A step that is not copied yet is lost with its worker. So the copy is not spread without end: in a
long step, its thread works for a fixed part of the time and is done early. Its bytes take the same
work at any speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FULL_SPEED = math.inf
_FIRST_SHARE = 0.5
_LEAST_SHARE, _MOST_SHARE = 0.1, 0.8
_GROWTH = 0.02
_CUT = 0.6
_TOLERATED = 0.01
_PATIENCE = 0.25
_WEIGHT = 0.3
LEAST_WORK = 0.25
"""The least part of its time for which the copying thread works: the rest of it, it rests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacer:
    """An estimate of the copy window, learned from the snapshots so far.

    ``window_s`` is the expected time from a snapshot to the moment its tensors change, 0 while
    unknown. ``share`` is the part of it over which the copy is spread, as far as the thread works
    for `LEAST_WORK` of the time; ``rate`` is its speed without rests, in bytes per second of a
    processor, 0 while unknown. If not ``enabled``, the speed is always full.
    """

    enabled: bool = True
    window_s: float = 0.0
    share: float = _FIRST_SHARE
    rate: float = 0.0

    def __post_init__(self) -> None:
        if self.window_s < 0:
            raise ValueError(f"a window of {self.window_s} s")
        if not 0 < self.share <= 1:
            raise ValueError(f"a share of {self.share} of the window; use 0 < share <= 1")
        if self.rate < 0:
            raise ValueError(f"a rate of {self.rate} bytes per second")

    @property
    def patience_s(self) -> float:
        """The time for which a copy may wait for memory; later, training may wait for it."""
        return _PATIENCE * self.window_s if self.enabled else 0.0

    def speed(self, nbytes: int, *, late_s: float = 0.0) -> float:
        """Return the copy's speed in bytes per second; `FULL_SPEED` means no limit.

        ``late_s`` is the time by which the copy begins later than the window.
        """
        spread_s = self.share * self.window_s - late_s
        if not self.enabled or spread_s <= 0:
            return FULL_SPEED
        return max(nbytes / spread_s, LEAST_WORK * self.rate)

    def after(self, *, window_s: float, waited_s: float, rate: float = 0.0) -> Pacer:
        """Return the estimate after one more snapshot.

        ``window_s`` passed until its tensors were to change, and ``waited_s`` more until they
        could. A window that is shorter than expected is taken over at once. ``rate`` is that of
        its copy, 0 if it is not known.
        """
        if self.window_s == 0 or window_s < self.window_s:
            window = window_s
        else:
            window = self.window_s + _WEIGHT * (window_s - self.window_s)
        if waited_s > _TOLERATED * max(window_s, 0.0):
            share = max(self.share * _CUT, _LEAST_SHARE)
        else:
            share = min(self.share + _GROWTH, _MOST_SHARE)
        if rate and self.rate:
            rate = self.rate + _WEIGHT * (rate - self.rate)
        return replace(self, window_s=window, share=share, rate=rate or self.rate)


def pause_s(*, speed: float, copied_bytes: int, elapsed_s: float) -> float:
    """Return the pause after ``copied_bytes``, in seconds, that keeps the copy below ``speed``."""
    return max(copied_bytes / speed - elapsed_s, 0.0)
