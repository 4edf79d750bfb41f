"""Counters and timers by name, with quantiles of recent values."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from holdfast.ckpt.types import Json

RECENT = 64
"""The number of newest measurements of a name from which its median and maximum are taken."""


@dataclass(slots=True)
class _Series:
    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


class Meters:
    """Totals since the start; safe to share between threads.

    Names are the stages of the data path: ``stall``, ``copy``, ``seal``, ``exchange``, ``protect``,
    ``rebuild``, ``persist``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meters: dict[str, _Series] = {}

    def add(self, name: str, seconds: float, nbytes: int = 0) -> None:
        """Add one measurement."""
        with self._lock:
            meter = self._meters.setdefault(name, _Series())
            meter.count += 1
            meter.seconds += seconds
            meter.nbytes += nbytes
            meter.recent_s.append(seconds)

    @contextmanager
    def timed(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Measure the duration of the body, unless it raises."""
        began_s = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - began_s, nbytes)

    def seconds(self, name: str) -> float:
        """Return the total seconds of a name, 0 for an unknown one."""
        with self._lock:
            return self._meters[name].seconds if name in self._meters else 0.0

    def status(self) -> dict[str, Json]:
        """Return ``{name: {count, seconds, bytes, median_s, max_s, last_s}}``.

        The last three are of the `RECENT` newest measurements.
        """
        with self._lock:
            return {
                name: {
                    "count": meter.count,
                    "seconds": round(meter.seconds, 6),
                    "bytes": meter.nbytes,
                    "median_s": round(median(meter.recent_s), 6),
                    "max_s": round(max(meter.recent_s), 6),
                    "last_s": round(meter.recent_s[-1], 6),
                }
                for name, meter in sorted(self._meters.items())
            }
