"""Wrong wall clocks for some processes.

They affect `CLOCK_REALTIME` of the C library, and with it ``time.time()`` and ``datetime.now()``.
On a real machine `CLOCK_MONOTONIC` neither jumps nor drifts by more than a few parts in ten
thousand; it stays as it is, and so do waits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from holdfast.tools.chaos.faults.injector import JobAccess, MissedError, Undo, Victim
from holdfast.tools.chaos.faults.preloaded.preload import CLOCK, Preload
from holdfast.tools.chaos.scenarios.strikes import Strike

_JUMP_S: Final = 3600.0
_DRIFT: Final = 0.1

KINDS: Final = frozenset({"clock-jump", "clock-skew"})


class ClockInjector:
    """Changes the wall clock that processes see."""

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Compile the library that is loaded before the C library. Raises ``ScenarioError``."""
        self._preload = Preload(site)
        return self._preload.environment

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Put the rule in force."""
        if not victim.pids:
            raise MissedError(f"{victim.name}: it has no process")
        if strike.kind == "clock-jump":
            jump_s = _JUMP_S if strike.amount is None else strike.amount
            undo = self._preload.add(CLOCK, victim.pids, offset_ns=int(jump_s * 1e9))
        else:
            rate = _DRIFT if strike.amount is None else strike.amount
            undo = self._preload.add(CLOCK, victim.pids, rate=rate, since_ns=time.time_ns())
        return undo if strike.lasts_s else None

    def close(self) -> None:
        """Do nothing: the rules end with the run's folder."""
