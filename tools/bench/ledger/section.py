"""Section ledger: claims, deliveries, memory and snapshots with up to a million samples.

Each ledger lives in a process of its own. Times are those of one core. First all samples are open,
then all are finished; then steps are trained and their place is filled again, so that figures after
ten and after a thousand steps show if anything grows with the age of a run.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from rich.console import Console

from holdfast.tools.bench.ledger.lives import GROUP, LedgerStage, LifePlan, live
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo, by_line

_GROUPS: Final = 25
_ETA: Final = 3
_COLUMNS: Final = {
    "claims": "claims/s",
    "completions": "completions/s",
    "message": "message",
    "step": "step",
    "memory": "per sample",
    "snapshot": "snapshot",
    "snapshot takes": "takes",
    "first snapshot takes": "the first",
    "restore takes": "restored in",
}


def plan_of(samples: int, *, ages: tuple[int, ...] = (10, 1000)) -> LifePlan:
    """Return the plan whose steps take few of many open samples, by prompt number."""
    eta = samples // (_GROUPS * GROUP) - 1
    return LifePlan(samples=samples, groups=_GROUPS, eta=eta, ages=ages)


def arrival_plan_of(samples: int, *, ages: tuple[int, ...] = (10,)) -> LifePlan:
    """Return the plan whose steps take a fourth of the open samples, as they arrive."""
    groups = samples // GROUP // (_ETA + 1)
    return LifePlan(samples=samples, groups=groups, eta=_ETA, ages=ages, by_arrival=True)


PLANS: Final = (
    plan_of(10_000),
    plan_of(100_000),
    plan_of(1_000_000),
    arrival_plan_of(10_000, ages=(10, 1000)),
    arrival_plan_of(100_000),
    arrival_plan_of(1_000_000, ages=()),
)
QUICK_PLANS: Final = (plan_of(10_000, ages=(10,)), arrival_plan_of(10_000, ages=(10,)))


def ledger(setup: BenchSetup, *, plans: Sequence[LifePlan] | None = None) -> list[Figure]:
    """Measure every plan once; the size of the state does not matter."""
    chosen = plans or (QUICK_PLANS if setup.quick else PLANS)
    found: list[Figure] = []
    with Tempo(setup, total=len(chosen)) as tempo:
        for plan in chosen:
            tempo.say(f"{plan.samples:,} samples")
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
                stages = pool.submit(live, plan).result()
            for stage in stages:
                found += _figures(plan, stage)
            tempo.beat()
    return found


def _figures(plan: LifePlan, stage: LedgerStage) -> Iterator[Figure]:
    how = " by arrival" if plan.by_arrival else ""
    values = {
        "claims": (1 / stage.claim_s if stage.claim_s else None, "/s"),
        "completions": (1 / stage.delivery_s if stage.delivery_s else None, "/s"),
        "message": (stage.message_s or None, "s"),
        "step": (stage.step_s or None, "s"),
        "memory": (stage.memory_bytes, "bytes"),
        "snapshot": (stage.snapshot_bytes / (1 << 20), "MiB"),
        "snapshot takes": (stage.snapshot_s, "s"),
        "first snapshot takes": (stage.first_snapshot_s, "s"),
        "restore takes": (stage.restore_s, "s"),
    }
    for what, (value, unit) in values.items():
        if value is not None:
            name = f"{plan.samples:,}{how}, {stage.name}: {what}"
            yield Figure(section="ledger", name=name, value=value, unit=unit, low=value, high=value)


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line per stage of each ledger."""
    console.print(by_line(figures, columns=_COLUMNS, cell=_cell))


def _cell(figure: Figure) -> str:
    if figure.unit == "s":
        return f"{figure.value * 1e3:,.2f} ms" if figure.value < 1 else f"{figure.value:.1f} s"
    if figure.unit == "MiB":
        return f"{figure.value:,.1f} MiB"
    return f"{figure.value:,.0f}" + (" B" if figure.unit == "bytes" else "")
