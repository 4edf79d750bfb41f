"""The samples of a job's events: counts that are exact however long the job is. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.elastic.events import (
    CheckpointDone,
    CheckpointFailed,
    CheckpointRetried,
    CheckpointSkipped,
    CheckpointUnsaved,
    DataWorkerDeath,
    DataWorkerHang,
    Detected,
    EnvironmentWaits,
    Event,
    EventsLost,
    FaultInjected,
    GenerationProposed,
    JobEnded,
    JobStarted,
    LossJudged,
    NodeExited,
    RestoreFailed,
    RoleMoved,
    RolloutsAwaited,
    RuleViolated,
    SnapshotsLeftOut,
    StateRestored,
    StepDone,
    StepProtected,
    StragglerFound,
    StragglerOver,
    TideAdopted,
    TokensSampled,
    WeightsPulled,
    WeightsRefused,
    WorkerExited,
    WorkerStarted,
)
from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of
from holdfast.tools.metrics.families import FAMILIES, PREFIX, BucketCounts, MetricSample
from holdfast.tools.traces.generations import GenerationTraces
from holdfast.tools.traces.spans import ROOT

_OTHER: Final = "other"

KINDS_OF_DETECTIONS: Final = (
    "exit",
    "hang",
    "stopped",
    "stall",
    "join",
    "notice",
    "node_lost",
    "unreachable",
    "lease_lost",
    "sidecar_exit",
)
TIERS: Final = ("arena", "prefetched", "peer", "parity", "disk", "checkpoint", "none")
ACTIONS: Final = ("warn", "skip", "rollback", "stop")

_AT_FIRST: Final = (
    ("unprotected_steps", ()),
    ("step", ()),
    ("job_failed", ()),
    *(("checkpoints_total", (result,)) for result in ("done", "failed", "skipped", "unsaved")),
    *(("restores_total", (tier,)) for tier in TIERS),
    ("restore_failures_total", ()),
    ("generations_total", ()),
    ("steps_executed_total", ()),
    ("steps_repeated_total", ()),
    ("checkpoint_retries_total", ()),
)
"""Series that are there from the start, so that the first increase is seen as one."""


class EventTally:
    """Folds the events of a run into samples; its memory grows with the nodes and seats only."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self._spreads: dict[tuple[str, tuple[str, ...]], BucketCounts] = {}
        self._places: dict[str, str] = {}
        self._held: dict[str, str] = {}
        self._sampled: dict[str, int] = {}
        self._changes = GenerationTraces()
        self._step = 0
        self._of_rank_0 = 0
        self._protected = -1

    def add(self, events: Iterable[Event]) -> None:
        """Count new events, oldest first."""
        for event in events:
            self._add(event)
            for span in self._changes.add(event):
                if span.key == ROOT and not span.error:
                    cause = str(span.about["holdfast.cause"])
                    took_s = span.end_s - span.start_s
                    self._observe("recovery_duration_seconds", took_s, cause)

    def samples(self) -> Iterator[MetricSample]:
        """Yield all samples."""
        for (name, labels), value in self._values.items():
            yield MetricSample(PREFIX + name, labels, value)
        for (name, labels), spread in self._spreads.items():
            yield MetricSample(PREFIX + name, labels, BucketCounts([*spread.counts], spread.total))

    def _add(self, event: Event) -> None:
        match event:
            case StepDone():
                self._on_step(event)
            case StepProtected(step=step):
                self._on_protected(step)
            case JobStarted():
                self._on_start(event)
            case JobEnded(ok=ok):
                self._set("job_running", 0)
                self._set("job_failed", not ok)
            case EventsLost(count=count):
                self._count("events_lost", event.node, by=count)
            case LossJudged(action=action):
                self._count("loss_judgements", _one_of(action, ACTIONS))
            case DataWorkerDeath() | DataWorkerHang():
                how = "death" if isinstance(event, DataWorkerDeath) else "hang"
                self._count("data_worker_failures", event.node, how)
            case StragglerFound(victim=seat, on=node):
                self._straggler(seat, node)
            case StragglerOver(victim=seat):
                self._straggler(seat, "")
            case SnapshotsLeftOut(count=count):
                self._set("snapshots_left_out", count, event.node)
            case _:
                self._of_membership(event)
                self._of_checkpoints(event)
                self._of_rollouts(event)

    def _of_membership(self, event: Event) -> None:
        match event:
            case WorkerStarted(seat=seat):
                self._places[seat] = event.node
                self._sampled.pop(seat, None)
                self._count("workers_started", event.node, role_of(seat))
            case WorkerExited(seat=seat):
                self._count("workers_exited", event.node, role_of(seat))
            case RoleMoved(was=was, becomes=becomes):
                more = (role_of(becomes) == TRAINER) - (role_of(was) == TRAINER)
                self._values["ranks_wanted", ()] += more
            case NodeExited(victim=node):
                self._count("node_exits", node)
            case Detected(what=what, victim=victim):
                node = self._node_of(victim, event.node)
                self._count("detections", node, _one_of(what, KINDS_OF_DETECTIONS))
            case FaultInjected():
                self._count("faults_injected")
            case GenerationProposed(ranks=ranks):
                self._count("generations")
                self._set("ranks", len(ranks))
                for name, labels in list(self._values):
                    if name == "snapshots_left_out":
                        self._set(name, 0, *labels)
            case StateRestored():
                tier = _one_of(event.tier, TIERS)
                self._count("restores", tier)
                self._count("restored_bytes", tier, by=event.bytes)
                self._count("restore_seconds", tier, by=event.seconds)
            case RestoreFailed():
                self._count("restore_failures")

    def _of_checkpoints(self, event: Event) -> None:
        match event:
            case CheckpointDone():
                self._count("checkpoints", "done")
                self._count("checkpoint_seconds", by=event.seconds)
                self._count("checkpoint_bytes", by=event.bytes)
                self._set("checkpoint_step", event.step)
                self._set("checkpoint_timestamp_seconds", event.time_s)
            case CheckpointFailed():
                self._count("checkpoints", "failed")
            case CheckpointSkipped():
                self._count("checkpoints", "skipped")
            case CheckpointUnsaved():
                self._count("checkpoints", "unsaved")
            case CheckpointRetried():
                self._count("checkpoint_retries")

    def _of_rollouts(self, event: Event) -> None:
        match event:
            case TokensSampled(tokens=tokens):
                before = self._sampled.get(event.seat, 0)
                self._sampled[event.seat] = tokens
                self._count("sampled_tokens", event.node, by=max(tokens - before, 0))
            case RolloutsAwaited(seconds=seconds):
                self._count("rollout_wait_seconds", by=seconds)
            case WeightsPulled():
                self._count("weights_pulled_bytes", event.node, by=event.bytes)
            case WeightsRefused():
                self._count("weights_refused", event.node)
            case RuleViolated():
                self._count("sample_violations")
            case EnvironmentWaits():
                self._count("environment_calls", event.node, by=event.calls)
                self._count("environment_failures", event.node, by=event.given_up)
            case TideAdopted(waited_s=waited_s):
                self._count("tides")
                self._count("tide_wait_seconds", by=waited_s)

    def _on_start(self, event: JobStarted) -> None:
        for name, labels in _AT_FIRST:
            self._values.setdefault((name, labels), 0.0)
        for node in event.nodes:
            for what in KINDS_OF_DETECTIONS:
                self._values.setdefault(("detections_total", (node, what)), 0.0)
        self._set("job_running", 1)
        self._set("ranks_wanted", event.wanted.get(TRAINER, 0))

    def _on_step(self, event: StepDone) -> None:
        if event.rank == 0:
            self._count("steps_executed")
            self._count("steps_repeated", by=event.step <= self._of_rank_0)
            self._of_rank_0 = max(self._of_rank_0, event.step)
        self._step = max(self._step, event.step)
        self._set("step", self._step)
        self._on_protected(event.protected)
        self._set("unprotected_seconds", event.unprotected_s, event.node)
        self._observe("step_duration_seconds", event.seconds)
        for cause, seconds in (
            ("snapshot", event.stall_s),
            ("ranks", event.waited_s),
            ("data", event.data_s),
        ):
            self._count("step_wait_seconds", event.node, cause, by=seconds)

    def _on_protected(self, step: int) -> None:
        self._protected = max(self._protected, step)
        self._set("unprotected_steps", max(self._step - max(self._protected, 0), 0))

    def _straggler(self, seat: str, node: str) -> None:
        """Set how many ranks of a node hold the others up; ``node`` is empty for one that ended."""
        before = self._held.pop(seat, "")
        if node:
            self._held[seat] = node
        for each in {before, node} - {""}:
            self._set("stragglers", sum(on == each for on in self._held.values()), each)

    def _node_of(self, victim: str, teller: str) -> str:
        """Return the node of a seat, a sidecar or a node."""
        if victim in self._places:
            return self._places[victim]
        name, _, rest = victim.partition("/")
        return name if rest == "sidecar" else teller if rest or victim == "trainers" else victim

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        self._values[f"{name}_total", labels] += by

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[name, labels] = float(value)

    def _observe(self, name: str, value: float, *labels: str) -> None:
        family = FAMILIES[PREFIX + name]
        spread = self._spreads.setdefault((name, labels), BucketCounts.of(family))
        spread.total += value
        spread.counts[sum(value > bound for bound in family.bounds)] += 1


def _one_of(value: str, known: tuple[str, ...]) -> str:
    return value if value in known else _OTHER
