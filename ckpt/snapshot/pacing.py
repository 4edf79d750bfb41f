"""A controller of the copy's speed, so that training slows least. Pure: no clock, no thread.

The copy of a snapshot may take from the call until the next optimizer step. At full speed it takes
memory bandwidth from the forward pass; too slow, it makes training wait. The controller spreads it
over a share of the expected window. The share shrinks at once when training had to wait, and grows
back slowly (additive increase, multiplicative decrease).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacer:
    """An estimate of the copy window, learned from the snapshots so far.

    ``window_s`` is the expected time from a snapshot to the moment its tensors change, 0 while
    unknown. ``share`` is the part of it over which the copy is spread. If not ``enabled``, the
    speed is always full.
    """

    enabled: bool = True
    window_s: float = 0.0
    share: float = _FIRST_SHARE

    def __post_init__(self) -> None:
        if self.window_s < 0:
            raise ValueError(f"a window of {self.window_s} s")
        if not 0 < self.share <= 1:
            raise ValueError(f"a share of {self.share} of the window; use 0 < share <= 1")

    @property
    def patience_s(self) -> float:
        """The time for which a copy may wait for memory; later, training may wait for it."""
        return _PATIENCE * self.window_s if self.enabled else 0.0

    def speed(self, nbytes: int, *, late_s: float = 0.0) -> float:
        """Return the copy's speed in bytes per second; `FULL_SPEED` means no limit.

        ``late_s`` is the time by which the copy begins later than the window.
        """
        spread_s = self.share * self.window_s - late_s
        return nbytes / spread_s if self.enabled and spread_s > 0 else FULL_SPEED

    def after(self, *, window_s: float, waited_s: float) -> Pacer:
        """Return the estimate after one more snapshot.

        ``window_s`` passed until its tensors were to change, and ``waited_s`` more until they
        could. A window that is shorter than expected is taken over at once.
        """
        if self.window_s == 0 or window_s < self.window_s:
            window = window_s
        else:
            window = self.window_s + _WEIGHT * (window_s - self.window_s)
        if waited_s > _TOLERATED * max(window_s, 0.0):
            share = max(self.share * _CUT, _LEAST_SHARE)
        else:
            share = min(self.share + _GROWTH, _MOST_SHARE)
        return replace(self, window_s=window, share=share)


def pause_s(*, speed: float, copied_bytes: int, elapsed_s: float) -> float:
    """Return the pause after ``copied_bytes``, in seconds, that keeps the copy below ``speed``."""
    return max(copied_bytes / speed - elapsed_s, 0.0)
