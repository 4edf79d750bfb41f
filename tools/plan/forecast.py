"""The forecast of a planned job: the best intervals, goodput, losses, memory, and reasons. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from holdfast.ckpt.parity.budget import MemoryNeed
from holdfast.ckpt.parity.estimate import memory_need
from holdfast.tools.plan.intervals import daly, least, taken, young
from holdfast.tools.plan.job import PlannedJob
from holdfast.tools.plan.losses import FailureRates, failure_rates, group_shapes

YEAR_S: Final = 365.25 * 86400.0
_MOST_STEPS: Final = 10**7


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Steps between two snapshots, and between two checkpoints."""

    snapshot: int
    checkpoint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LostShares:
    """Shares of wall time, from 0 to 1, that are not useful."""

    snapshots: float
    checkpoints: float
    from_memory: float
    from_store: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Classic:
    """Intervals by the formulas, in useful seconds: of snapshots and of checkpoints."""

    young_snapshot_s: float
    daly_snapshot_s: float
    young_checkpoint_s: float
    daly_checkpoint_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The expectation of a job with certain intervals.

    ``goodput`` is the useful share of wall time. ``wall_s`` is infinite for a job that would never
    end. ``memory`` is the shared memory of the node that needs most. ``lost_work_s`` has the mean
    work that a failure repeats: from memory, and from the store.
    """

    job: PlannedJob
    intervals: Intervals
    rates: FailureRates
    goodput: float
    costs: LostShares
    memory: MemoryNeed
    classic: Classic
    lost_work_s: tuple[float, float]

    @property
    def wall_s(self) -> float:
        """The expected time of the job."""
        return self.job.useful_s / self.goodput if self.goodput else math.inf

    def chance_of_loss(self, seconds: float) -> float:
        """Return the chance that memory loses steps at least once within so many seconds."""
        return -math.expm1(-self.rates.lost * seconds) if math.isfinite(seconds) else 1.0


def best(job: PlannedJob, *, every: int | None = None, checkpoint: int | None = None) -> Forecast:
    """Return the forecast with the best intervals; given ones (in steps) are kept.

    A snapshot is not taken before the one before is protected, and no checkpoint is begun before
    the last is written. A checkpoint is of a step that has a snapshot.
    """
    low = max(math.ceil(job.protection_s / job.step_s), 1) if job.lost_with_memory else 1
    if every is None:
        high = _reach(job, low)
        every = least(lambda n: -_best_of(job, n, checkpoint)[1], low=low, high=high)
    return forecast(job, Intervals(snapshot=every, checkpoint=_best_of(job, every, checkpoint)[0]))


def _reach(job: PlannedJob, low: int) -> int:
    """Return a number of steps that is longer than any good interval between snapshots."""
    rates = failure_rates(job, window_s=_window_s(job, low))
    wanted_s = daly(job.snapshot_s, rates.soft) * 4.0
    steps = wanted_s / job.step_s if math.isfinite(wanted_s) else _MOST_STEPS
    return max(low, min(math.ceil(steps) + 1, _MOST_STEPS))


def _window_s(job: PlannedJob, every: int) -> float:
    """Return the time from a loss until a step is protected in new groups."""
    return job.return_s + every * job.step_s + job.protection_s


def _slowdown(job: PlannedJob, every: int, rates: FailureRates) -> float:
    """Return wall time over useful time with snapshots only, as far as memory makes losses good."""
    useful_s = every * job.step_s
    spent_s = taken(
        useful_s,
        cost_s=job.snapshot_s,
        rate=rates.soft,
        return_s=job.return_s + job.protection_s,
    )
    return spent_s / useful_s


def _goodput(job: PlannedJob, *, checkpoint: int, slowdown: float, rates: FailureRates) -> float:
    useful_s = checkpoint * job.step_s
    if not math.isfinite(slowdown):
        return 0.0
    spent_s = taken(
        useful_s * slowdown,
        cost_s=job.checkpoint_s,
        rate=rates.hard,
        return_s=job.reload_s + job.persist_s,
    )
    return useful_s / spent_s if math.isfinite(spent_s) else 0.0


def _best_of(job: PlannedJob, every: int, checkpoint: int | None) -> tuple[int, float]:
    """Return the best steps between checkpoints, and the goodput, for steps between snapshots."""
    rates = failure_rates(job, window_s=_window_s(job, every))
    slowdown = _slowdown(job, every, rates)

    def goodput(count: int) -> float:
        return _goodput(job, checkpoint=count * every, slowdown=slowdown, rates=rates)

    if checkpoint is not None:
        return checkpoint, _goodput(job, checkpoint=checkpoint, slowdown=slowdown, rates=rates)
    unit_s = every * job.step_s * (slowdown if math.isfinite(slowdown) else 1.0)
    low = max(math.ceil(job.persist_s / unit_s), 1)
    wanted_s = min(daly(job.checkpoint_s, rates.hard) * 4.0, max(job.useful_s, job.step_s))
    high = max(low, math.ceil(wanted_s / (every * job.step_s)))
    count = least(lambda n: -goodput(n), low=low, high=high)
    return count * every, goodput(count)


def goodputs(job: PlannedJob, every: int, checkpoints: Sequence[int]) -> list[float]:
    """Return the goodput for each of several intervals between checkpoints, in steps."""
    rates = failure_rates(job, window_s=_window_s(job, every))
    slowdown = _slowdown(job, every, rates)
    return [_goodput(job, checkpoint=n, slowdown=slowdown, rates=rates) for n in checkpoints]


def forecast(job: PlannedJob, intervals: Intervals) -> Forecast:
    """Return the expectation of a job with these intervals."""
    rates = failure_rates(job, window_s=_window_s(job, intervals.snapshot))
    slowdown = _slowdown(job, intervals.snapshot, rates)
    goodput = _goodput(job, checkpoint=intervals.checkpoint, slowdown=slowdown, rates=rates)
    saved_s = intervals.snapshot * job.step_s, intervals.checkpoint * job.step_s
    lost_s = saved_s[0] / 2.0 + job.protection_s, saved_s[1] / 2.0 + job.persist_s
    parts = (
        job.snapshot_s / saved_s[0],
        job.checkpoint_s / saved_s[1],
        rates.soft * (job.return_s + lost_s[0]),
        rates.hard * (job.reload_s + lost_s[1]),
    )
    scale = (1.0 - goodput) / (sum(parts) or 1.0)
    snapshots, checkpoints, from_memory, from_store = (part * scale for part in parts)
    return Forecast(
        job=job,
        intervals=intervals,
        rates=rates,
        goodput=goodput,
        costs=LostShares(
            snapshots=snapshots,
            checkpoints=checkpoints,
            from_memory=from_memory,
            from_store=from_store,
        ),
        memory=memory(job),
        classic=Classic(
            young_snapshot_s=young(job.snapshot_s, rates.soft),
            daly_snapshot_s=daly(job.snapshot_s, rates.soft),
            young_checkpoint_s=young(job.checkpoint_s, rates.hard),
            daly_checkpoint_s=daly(job.checkpoint_s, rates.hard),
        ),
        lost_work_s=lost_s,
    )


def memory(job: PlannedJob) -> MemoryNeed:
    """Return the shared memory of the node that needs most.

    A node's memory depends on its own group alone, so each size of group is looked at once.
    """
    shapes = group_shapes(job) if job.lost_with_memory else [(1, ())]
    sizes = {size for size, _ in shapes}
    fixed = int(job.rank_bytes * (1.0 - job.moving))
    needs = [
        memory_need(
            job.rank_bytes,
            nodes=size,
            ranks_per_node=job.workers,
            parity=job.parity,
            group=max(size, 2),
            keep=job.keep,
            fixed_bytes=fixed,
        )
        for size in sizes
    ]
    return max(needs, key=lambda need: need.total)


def alternatives(job: PlannedJob) -> list[Forecast]:
    """Return the best forecasts with the parities that the nodes allow, the job's own too."""
    found = []
    for parity in dict.fromkeys((0, 1, 2, 3, "replicate", job.parity)):
        lost = 1 if parity == "replicate" else int(parity)
        if lost < min(job.nodes, job.group):
            found.append(best(replace(job, parity=parity)))
    return found
