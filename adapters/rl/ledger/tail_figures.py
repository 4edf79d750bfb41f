"""Figures of a step's slowest samples: lengths, waiting, busy slots, tokens carried over. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory
from holdfast.elastic.events import StepTail


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that is not below this share of the values; 0 for no values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    rank = -(-len(ordered) * round(share * 100) // 100)
    return ordered[max(0, rank - 1)]


@dataclass(slots=True)
class Tail:
    """Collects the figures of a step until it has its samples; times are seconds of one clock."""

    _arrived: dict[SampleId, float] = field(default_factory=dict)
    _since: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    _busy_s: float = 0.0
    _slots_s: float = 0.0
    _working_s: float = 0.0
    _workers_s: float = 0.0

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

    def forget(self, ordinals: Collection[int]) -> None:
        """Forget samples that will not be trained on, of ordinals that a step took."""
        self._arrived = {key: at_s for key, at_s in self._arrived.items() if key[0] not in ordinals}

    def _count(self, worker: str, now_s: float) -> None:
        since_s, busy, slots = self._since.get(worker, (now_s, 0, 0))
        self._busy_s += busy * (now_s - since_s)
        self._slots_s += slots * (now_s - since_s)
        self._working_s += (busy > 0) * (now_s - since_s)
        self._workers_s += now_s - since_s

    def step(
        self,
        samples: Iterable[Trajectory],
        *,
        completes: int,
        carried_tokens: int,
        ordinals: tuple[int, ...] | None = None,
        now_s: float,
    ) -> StepTail:
        """Return the figures of the step that ``completes`` so many, and start those of the next.

        It took ``samples``; the rest as in `StepTail`.
        """
        samples = list(samples)
        waited = [now_s - self._arrived.pop(each.key, now_s) for each in samples]
        for worker, (_, occupied, slots) in list(self._since.items()):
            self.occupied(worker, busy=occupied, slots=slots, now_s=now_s)
        busy = self._busy_s / self._slots_s if self._slots_s else 0.0
        working = self._working_s / self._workers_s if self._workers_s else 0.0
        self._busy_s = self._slots_s = self._working_s = self._workers_s = 0.0
        lengths = [each.sampled for each in samples]
        return StepTail(
            step=completes,
            length_p50_tokens=percentile(lengths, 0.5),
            length_p95_tokens=percentile(lengths, 0.95),
            length_max_tokens=percentile(lengths, 1.0),
            waited_p50_s=percentile(waited, 0.5),
            waited_p95_s=percentile(waited, 0.95),
            waited_max_s=percentile(waited, 1.0),
            busy=round(busy, 4),
            working=round(working, 4),
            carried_tokens=carried_tokens,
            ordinals=ordinals,
        )
