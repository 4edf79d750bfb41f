"""The forecast in words: why these intervals, what is lost when, and what would be better. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.ckpt.checkpoints.retention_rules import duration
from holdfast.tools.plan.forecast import YEAR_S, Forecast
from holdfast.tools.terminal import readable

_NEVER = "never"


def reasons(found: Forecast, others: Sequence[Forecast], *, budget: int | None = None) -> list[str]:
    """Return sentences that explain a forecast, beside those with other parities.

    ``budget`` is the host memory in bytes that a node may spend.
    """
    if not found.goodput:
        return [
            "The job would not end: it fails faster than it comes back. Take fewer or better "
            "nodes, shorter recoveries, or more parity."
        ]
    lines = [_snapshots(found), _checkpoints(found), _losses(found)]
    lines += _domains(found)
    if budget is not None:
        lines.append(_memory(found, budget))
    if better := _better(found, others, budget):
        lines.append(better)
    return lines


def span(seconds: float) -> str:
    """Return a duration for people."""
    if not math.isfinite(seconds) or seconds > 1e4 * YEAR_S:
        return _NEVER
    if seconds >= 2 * YEAR_S:
        return f"{seconds / YEAR_S:.3g} years"
    if seconds >= 86400:
        days = f"{seconds / 86400:.3g}"
        return f"{days} day{'s' * (days != '1')}"
    return duration(seconds) if seconds >= 1 else f"{seconds * 1000:.3g}ms"


def chance(value: float) -> str:
    """Return a probability for people."""
    if value >= 0.9995:
        return "almost certain"
    if value >= 0.001:
        return f"{value:.1%}"
    if value <= 1e-15:
        return "less than 1 in 1e15"
    odds = float(f"{1 / value:.2g}")
    return f"1 in {odds:,.0f}" if odds < 1e6 else f"1 in {odds:.1e}"


def share(value: float) -> str:
    """Return a share of time for people."""
    return f"{value:.2%}" if value >= 1e-4 or value == 0 else f"{value:.1g}"


def steps(count: int) -> str:
    """Return a number of steps in words."""
    return "every step" if count == 1 else f"every {count} steps"


def _snapshots(found: Forecast) -> str:
    job, every = found.job, found.intervals.snapshot
    failure_s = 1.0 / found.rates.soft if found.rates.soft else math.inf
    text = (
        f"Snapshot {steps(every)} ({span(every * job.step_s)}): one costs "
        f"{span(job.snapshot_s)} of training, and memory makes good a failure every "
        f"{span(failure_s)}. Young's interval is {span(found.classic.young_snapshot_s)}, Daly's "
        f"{span(found.classic.daly_snapshot_s)}"
    )
    if every > 1 and job.lost_with_memory and (every - 1) * job.step_s < job.protection_s:
        return f"{text}; protecting a step takes {span(job.protection_s)}, so no shorter one works."
    return f"{text}."


def _checkpoints(found: Forecast) -> str:
    job, every = found.job, found.intervals.checkpoint
    hard_s = 1.0 / found.rates.hard if found.rates.hard else math.inf
    text = (
        f"Checkpoint {steps(every)} ({span(every * job.step_s)}): one costs "
        f"{span(job.checkpoint_s)} of training, is written in {span(job.persist_s)} beside it, and "
        f"is needed every {span(hard_s)}"
    )
    lost = span(1.0 / found.rates.lost) if found.rates.lost else _NEVER
    parts = [
        "memory loses nothing in 10,000 years"
        if lost == _NEVER
        else f"memory loses more nodes than parity makes good every {lost}"
    ]
    if found.rates.outage:
        parts.append(f"the whole job is lost every {span(1.0 / found.rates.outage)}")
    text = f"{text}: {', and '.join(parts)}. "
    classic = found.classic
    return (
        f"{text}Young's interval is {span(classic.young_checkpoint_s)}, Daly's "
        f"{span(classic.daly_checkpoint_s)}."
    )


def _losses(found: Forecast) -> str:
    memory_s, store_s = found.lost_work_s
    job = found.job
    return (
        f"A failure that memory makes good costs {span(job.return_s)}, and {span(memory_s)} of "
        f"work that is done again; one that needs a checkpoint costs {span(job.reload_s)}, and "
        f"{span(store_s)} of work."
    )


def _domains(found: Forecast) -> list[str]:
    """Tell which racks and power feeds no memory survives."""
    job, rates = found.job, found.rates
    lines = []
    for name, fatal, count in (
        ("rack", rates.fatal_racks, job.racks),
        ("power feed", rates.fatal_feeds, job.feeds),
    ):
        if fatal:
            which = f"Every {name}" if fatal == count else f"{fatal} of {count} {name}s"
            lines.append(
                f"{which} holds more than {job.lost_with_memory} nodes of a parity group: losing "
                f"it whole is not survived by memory. More {name}s, smaller groups or more parity "
                "help."
            )
    return lines


def _memory(found: Forecast, budget: int) -> str:
    need = found.memory
    if need.total > budget:
        return (
            f"It does not fit: a node needs {readable(need.total)} of shared memory and may spend "
            f"{readable(budget)}. Give it more, or take less parity or larger groups."
        )
    if need.total + need.lent > budget:
        return (
            f"It fits, but without the lent slots ({readable(need.lent)} more): a snapshot waits "
            "until the one before it is protected."
        )
    return "It fits the memory, lent slots included."


def _better(found: Forecast, others: Sequence[Forecast], budget: int | None) -> str:
    fitting = [each for each in others if budget is None or each.memory.total <= budget]
    if not fitting:
        return ""
    top = max(fitting, key=lambda each: (round(each.goodput, 4), -each.memory.total))
    if top.job.parity == found.job.parity or top.goodput - found.goodput < 0.0005:
        return ""
    return (
        f"parity={top.job.parity} would be better: goodput {top.goodput:.2%} instead of "
        f"{found.goodput:.2%}, with {readable(top.memory.total)} of memory for each node."
    )
