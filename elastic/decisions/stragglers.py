"""Detection of stragglers: robust outliers among the ranks' times for a microbatch. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from holdfast.elastic.membership.view import JobView

_MAD_TO_DEVIATION = 1.4826
_LEAST_SPREAD = 0.05
_DEVIATIONS = 5.0
_TIMES = 1.3
_MUCH = 0.5
_SHARED_FROM = 32  # among more, one rank does not move the median

STEPS = 16
"""Number of steps over which a rank's pace is measured, so that one slow step does not count."""

_LEAST_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """The use of time in a rank's last steps.

    ``speed`` is in microbatches per second of computing; ``waits`` is the fraction of a step in
    which it waited for others. ``data`` is the fraction of its own part in which it waited for its
    data. ``busy`` is the processor time per second of its own part: near 0 it waits for something
    else, such as a device.
    """

    speed: float
    waits: float
    data: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step of a rank, in seconds, with its waits for others, for a snapshot and for data."""

    seconds: float
    waited_s: float
    stalled_s: float
    data_s: float
    cpu_s: float
    microbatches: int

    @property
    def computes_s(self) -> float:
        """The time in which it waited neither for others nor for a snapshot."""
        return max(0.0, self.seconds - self.waited_s - self.stalled_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that takes ``times`` as long for a microbatch as the median of the others."""

    seat: str
    node: str
    times: float
    microbatch_s: float
    others_s: float
    waits: float
    data: float
    busy: float

    @property
    def computes(self) -> bool:
        """True if it computes all that time, instead of waiting for its data or device."""
        return self.data < _MUCH and self.busy >= _MUCH

    def __str__(self) -> str:
        why = "it computes all that time"
        if self.data >= _MUCH:
            why = f"it waits for its data {self.data:.0%} of it"
        elif not self.computes:
            why = f"its processor is idle {1 - self.busy:.0%} of it: look at its device and disks"
        return (
            f"{self.seat} on {self.node} takes {self.times:.1f} times as long as the others for a "
            f"microbatch ({self.microbatch_s:.3g} s against {self.others_s:.3g} s); {why}; it "
            f"waits for others {self.waits:.0%} of a step"
        )


def pace(steps: Iterable[StepTimes]) -> RankPace | None:
    """Return the pace of a rank's newest steps, None while there are too few."""
    newest = [step for step in steps if step.microbatches and step.computes_s > 0]
    if len(newest) < _LEAST_STEPS:
        return None
    each_s = median(step.computes_s / step.microbatches for step in newest)
    waits = median(step.waited_s / step.seconds if step.seconds else 0.0 for step in newest)
    busy = median(min(1.0, step.cpu_s / step.computes_s) for step in newest)
    data = median(min(1.0, step.data_s / step.computes_s) for step in newest)
    return RankPace(speed=1.0 / each_s, waits=min(1.0, waits), data=data, busy=busy)


def outliers(seconds: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the names that take too long, with the factor and the median of the others.

    A rank is compared with all others without itself, so two ranks are enough, and a slow rank is
    not hidden by the spread that it causes. It must be `_DEVIATIONS` robust deviations (1.4826 ×
    the median absolute deviation, at least 5 % of the median) and `_TIMES` as slow as their median.
    """
    found: dict[str, tuple[float, float]] = {}
    shared = _usual(list(seconds.values())) if len(seconds) > _SHARED_FROM else None
    for name, own in seconds.items():
        others = () if shared else [each for other, each in seconds.items() if other != name]
        if not shared and not others:
            continue
        middle, deviation = shared or _usual(others)
        far = own > middle + _DEVIATIONS * max(deviation, _LEAST_SPREAD * middle)
        if middle > 0 and far and own >= _TIMES * middle:
            found[name] = (own / middle, middle)
    return found


def _usual(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the robust deviation from it."""
    middle = median(values)
    return middle, _MAD_TO_DEVIATION * median([abs(each - middle) for each in values])


def stragglers(view: JobView) -> list[Straggler]:
    """Return the stragglers among the ranks of the newest generation, slowest first."""
    if view.generation is None:
        return []
    inside = {member.incarnation for member in view.generation.members}
    ranks = {
        worker.seat: (node, worker)
        for node, worker in view.workers()
        if worker.incarnation in inside and worker.speed > 0
    }
    seconds = {seat: 1.0 / worker.speed for seat, (_, worker) in ranks.items()}
    found = [
        Straggler(
            seat=seat,
            node=ranks[seat][0].node,
            times=times,
            microbatch_s=seconds[seat],
            others_s=others_s,
            waits=ranks[seat][1].waits,
            data=ranks[seat][1].data,
            busy=ranks[seat][1].busy,
        )
        for seat, (times, others_s) in outliers(seconds).items()
    ]
    return sorted(found, key=lambda each: (-each.times, each.seat))
