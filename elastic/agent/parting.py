"""The workers whose seats are gone because their places moved to another role: led out one by one.

`holdfast.elastic.decisions.moving.farewell` decides; this module carries it out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from holdfast.elastic.agent.workers import SeatProcess
from holdfast.elastic.decisions.moving import Farewell, farewell
from holdfast.elastic.events.job import MOVED


@dataclass(slots=True)
class _Times:
    since_s: float
    ends_by_s: float | None = None


class Parting:
    """Knows the workers that part; ``stop_timeout_s`` is the time that one has to end by itself."""

    def __init__(self, *, stop_timeout_s: float) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._times: dict[str, _Times] = {}

    def __contains__(self, worker: SeatProcess) -> bool:
        """Return whether the worker parts, or did so."""
        return worker.incarnation in self._times

    def lead_out(self, worker: SeatProcess) -> None:
        """Take the next step with a worker: let it hand over, then ask it to end, then kill it."""
        now_s = time.monotonic()
        times = self._times.setdefault(worker.incarnation, _Times(now_s))
        since_s, handed = now_s - times.since_s, worker.handed > 0
        match farewell(worker.role, worker.state, handed=handed, since_s=since_s):
            case Farewell.HAND_OVER:
                worker.page.set_leaving()
            case Farewell.END if worker.alive and times.ends_by_s is None:
                times.ends_by_s = now_s + self._stop_timeout_s
                worker.stop(MOVED)
            case Farewell.END if times.ends_by_s is not None and now_s > times.ends_by_s:
                worker.child.kill()
