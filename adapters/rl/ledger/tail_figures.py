"""Figures of a step's slowest samples: lengths, waiting, busy slots, tokens carried over. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory
from holdfast.ckpt.types import Json


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that is not below this share of the values; 0 for no values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    rank = -(-len(ordered) * round(share * 100) // 100)
    return ordered[max(0, rank - 1)]


def spread(name: str, values: Iterable[float]) -> dict[str, Json]:
    """Return median, 95th percentile and maximum, as fields ``{name}_p50``, ``_p95``, ``_max``."""
    values = list(values)
    shares = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {f"{name}_{label}": percentile(values, share) for label, share in shares.items()}


@dataclass(slots=True)
class Tail:
    """Collects the figures of a step until it has its samples; times are seconds of one clock."""

    _arrived: dict[SampleId, float] = field(default_factory=dict)
    _since: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    _busy_s: float = 0.0
    _slots_s: float = 0.0

    def arrived(self, key: SampleId, *, now_s: float) -> None:
        """Record that a sample is finished."""
        self._arrived.setdefault(key, now_s)

    def occupied(self, worker: str, *, busy: int, slots: int, now_s: float) -> None:
        """Record how many of a worker's slots are busy from now on."""
        self._count(worker, now_s)
        self._since[worker] = now_s, busy, slots

    def gone(self, worker: str, *, now_s: float) -> None:
        """Record that a worker has no slots any more."""
        self._count(worker, now_s)
        self._since.pop(worker, None)

    def _count(self, worker: str, now_s: float) -> None:
        since_s, busy, slots = self._since.get(worker, (now_s, 0, 0))
        self._busy_s += busy * (now_s - since_s)
        self._slots_s += slots * (now_s - since_s)

    def step(self, samples: Iterable[Trajectory], *, carried: int, now_s: float) -> dict[str, Json]:
        """Return the figures of a step that took ``samples``, and start those of the next step.

        ``carried`` tokens stay for later steps.
        """
        samples = list(samples)
        waited = [now_s - self._arrived.pop(each.key, now_s) for each in samples]
        for worker, (_, occupied, slots) in list(self._since.items()):
            self.occupied(worker, busy=occupied, slots=slots, now_s=now_s)
        busy = self._busy_s / self._slots_s if self._slots_s else 0.0
        self._busy_s = self._slots_s = 0.0
        return {
            **spread("length", [each.sampled for each in samples]),
            **spread("waited_s", waited),
            "busy": round(busy, 4),
            "carried": carried,
        }
