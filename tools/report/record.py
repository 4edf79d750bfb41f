"""The content of `report.json`, from which the page can be drawn again. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.ckpt.types import Json
from holdfast.tools.report.snapshot_costs import Cost
from holdfast.tools.report.timeline import PHASES, Recovery, Timeline

REPORT_FORMAT = 1


class FaultRow(msgspec.Struct, frozen=True, kw_only=True):
    """An injected fault; ``time`` is in seconds since the job started."""

    kind: str
    time: float
    victim: str
    node: str
    step: int


class RecoveryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A recovery and the duration of each phase; 0 for a phase that the fault does not need."""

    fault: str
    victim: str
    time: float
    detect_s: float
    agree_s: float
    reform_s: float
    restore_s: float
    reexecute_s: float
    total_s: float
    steps_lost: int
    generation: int | None
    restore_step: int | None
    restore_how: str
    note: str


class HeldOutResult(msgspec.Struct, frozen=True, kw_only=True):
    """Answers, after ``step`` steps, to problems that the model never trains on.

    ``exact_match`` is the expected share of right answers when sampling; ``greedy`` is the share of
    right answers when each token is the most likely one.
    """

    step: int
    exact_match: float
    greedy: float


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a demo: verdict, record of the run, and the command to repeat it."""

    format: int = REPORT_FORMAT
    verdict: dict[str, bool]
    failures: list[str]
    faults: list[FaultRow]
    recoveries: list[RecoveryRow]
    recovery_summary: dict[str, dict[str, float]]
    final_hash: str
    reference_hash: str
    goodput: float
    time_shares: dict[str, float]
    reference_goodput: float
    reference_time_shares: dict[str, float]
    reward: list[float]
    reference_reward: list[float]
    heldout: list[HeldOutResult]
    ledger: dict[str, Json]
    generations: list[dict[str, Json]]
    steps: int
    wall_s: float
    reference_wall_s: float
    config: dict[str, Json]
    software: dict[str, str]
    machine: dict[str, str]
    seed: int
    command: str
    timeline: Timeline
    snapshots: Cost | None = None

    @property
    def passed(self) -> bool:
        """True if every check held."""
        return all(self.verdict.values())


def fault_rows(timeline: Timeline) -> list[FaultRow]:
    """Return the faults of a job as rows of the report."""
    return [
        FaultRow(kind=f.kind, time=f.time_s, victim=f.victim, node=f.node, step=f.step)
        for f in timeline.faults
    ]


def recovery_rows(timeline: Timeline) -> list[RecoveryRow]:
    """Return the recoveries of a job as rows of the report."""
    return [_recovery_row(recovery) for recovery in timeline.recoveries]


def _recovery_row(recovery: Recovery) -> RecoveryRow:
    return RecoveryRow(
        fault=recovery.kind,
        victim=recovery.victim,
        time=recovery.time_s,
        detect_s=recovery.detect_s or 0.0,
        agree_s=recovery.agree_s or 0.0,
        reform_s=recovery.reform_s or 0.0,
        restore_s=recovery.restore_s or 0.0,
        reexecute_s=recovery.reexecute_s or 0.0,
        total_s=recovery.total_s or 0.0,
        steps_lost=recovery.steps_lost,
        generation=recovery.generation,
        restore_step=recovery.restore_step,
        restore_how=recovery.restore_how,
        note=recovery.note,
    )


def summarise(rows: Sequence[RecoveryRow]) -> dict[str, dict[str, float]]:
    """Return mean and maximum of every phase over the recoveries of trainers."""
    trained = [row for row in rows if row.generation is not None]
    if not trained:
        return {}
    columns: Mapping[str, list[float]] = {
        phase: [float(getattr(row, phase)) for row in trained] for phase in (*PHASES, "total_s")
    }
    return {
        phase: {"mean": statistics.fmean(values), "max": max(values)}
        for phase, values in columns.items()
    }
