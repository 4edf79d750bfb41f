"""The verdict on a demo: one key per check, one sentence per failure. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from holdfast.ckpt.types import Json
from holdfast.elastic.events import Event, RolloutRecovered, StepDone, WorkerExited, of_kind
from holdfast.tools.report.timeline import KILL_ROLLOUT, Timeline


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the verdict: results and events of both jobs, and the plan."""

    hurt: dict[str, Json]
    reference: dict[str, Json]
    events: list[Event]
    timeline: Timeline
    steps: int
    ordinals: int
    kills_pending: int
    killed_pids: frozenset[int]
    leftovers: list[str]
    must_learn: bool


def judge(evidence: Evidence) -> tuple[dict[str, bool], list[str]]:
    """Return the outcome of every check, and a sentence for each that failed."""
    checks: dict[str, Callable[[Evidence], str | None]] = {
        "exact": _exact,
        "ledger_ok": _ledger,
        "steps_ok": _steps,
        "faults_ok": _faults,
        "survivors_ok": _survivors,
        "cleanup_ok": _cleanup,
    }
    if evidence.must_learn:
        checks["learned"] = _learned
    failures = {name: check(evidence) for name, check in checks.items()}
    verdict = {name: failure is None for name, failure in failures.items()}
    return verdict, [f"{name}: {failure}" for name, failure in failures.items() if failure]


def _exact(evidence: Evidence) -> str | None:
    hurt, reference = evidence.hurt, evidence.reference
    if hurt["final_hash"] != reference["final_hash"]:
        return f"final hash {hurt['final_hash']}, undisturbed {reference['final_hash']}"
    for name in ("reward", "heldout"):
        if hurt[name] != reference[name]:
            at = first_difference(hurt[name], reference[name])
            return f"the weights are equal but {name} differs from entry {at} on"
    return None


def first_difference(left: Sequence[Json], right: Sequence[Json]) -> int:
    """Return the index of the first entry that differs, or the shorter length."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def _ledger(evidence: Evidence) -> str | None:
    for name, result in (("hurt", evidence.hurt), ("undisturbed", evidence.reference)):
        ledger = result["ledger"]
        if not ledger["ok"]:
            return f"{name} job: {'; '.join(ledger['violations'])}"
        counts = {state: count for state, count in ledger["ordinals"].items() if count}
        if counts != {"trained": evidence.ordinals}:
            return f"{name} job: {counts}, needed: all {evidence.ordinals} prompts trained"
    return None


def _steps(evidence: Evidence) -> str | None:
    for name, result in (("hurt", evidence.hurt), ("undisturbed", evidence.reference)):
        if result["steps"] != evidence.steps:
            return f"the {name} job completed {result['steps']} of {evidence.steps} steps"
    return None


def _faults(evidence: Evidence) -> str | None:
    if evidence.kills_pending:
        return f"{evidence.kills_pending} planned kills did not happen before the job ended"
    for recovery in evidence.timeline.recoveries:
        if recovery.total_s is None:
            return f"no recovery follows the {recovery.kind} of {recovery.victim}"
    killed = {f.victim for f in evidence.timeline.faults if f.kind == KILL_ROLLOUT}
    found = of_kind(evidence.events, RolloutRecovered)
    if killed and not any(event.worker in killed and event.unfinished for event in found):
        return f"{sorted(killed)} died between two sequences, needed: in the middle of one"
    return None


def _survivors(evidence: Evidence) -> str | None:
    last_s = max((event.time_s for event in of_kind(evidence.events, StepDone)), default=0.0)
    for event in of_kind(evidence.events, WorkerExited):
        if event.time_s < last_s and event.pid not in evidence.killed_pids:
            return f"{event.seat} (pid {event.pid}) ended though nobody killed it"
    return None


def _cleanup(evidence: Evidence) -> str | None:
    return "; ".join(evidence.leftovers) or None


def _learned(evidence: Evidence) -> str | None:
    curve = evidence.hurt["heldout"]
    if curve and curve[-1][1] > curve[0][1]:
        return None
    return f"held-out exact match did not rise: {curve}"
