"""The table of all metrics: names, kinds, labels, sentences. Pure.

Every label has few values: the nodes of the job, or one of a fixed list. A step, a rank or a
message is never one, so that the number of series does not grow with the length of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

PREFIX: Final = "holdfast_"

STEP_BOUNDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
RECOVERY_BOUNDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class MetricFamily(NamedTuple):
    """A metric: ``bounds`` are the upper limits of a histogram's buckets, in seconds."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    about: str
    bounds: tuple[float, ...] = ()


@dataclass(slots=True)
class BucketCounts:
    """The value of a histogram: how many lie in each bucket, the last without a limit."""

    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, family: MetricFamily) -> BucketCounts:
        """Return an empty one."""
        return cls([0] * (len(family.bounds) + 1))


class MetricSample(NamedTuple):
    """A metric's value for one combination of its labels."""

    name: str
    labels: tuple[str, ...]
    value: float | BucketCounts


def _gauge(name: str, about: str, *labels: str) -> MetricFamily:
    return MetricFamily(PREFIX + name, "gauge", labels, about)


def _counter(name: str, about: str, *labels: str) -> MetricFamily:
    return MetricFamily(f"{PREFIX}{name}_total", "counter", labels, about)


def _histogram(name: str, about: str, *labels: str, bounds: tuple[float, ...]) -> MetricFamily:
    return MetricFamily(PREFIX + name, "histogram", labels, about, bounds)


OF_STATUS: Final = (
    _gauge("up", "Whether the node's sidecar answers.", "node"),
    _gauge("generation", "The generation that the sidecar guards.", "node"),
    _gauge("committed_step", "The newest committed step.", "node"),
    _gauge("protected_step", "The newest protected step.", "node"),
    _gauge("durable_step", "The newest step in a checkpoint.", "node"),
    _gauge("protected_age_seconds", "Age of the newest protected step.", "node"),
    _gauge("workers", "Worker processes of the node.", "node"),
    _gauge("unreachable_nodes", "Other nodes that the node does not reach.", "node"),
    _counter("stage_runs", "Number of runs of a stage.", "node", "stage"),
    _counter("stage_seconds", "Total time of a stage.", "node", "stage"),
    _counter("stage_bytes", "Bytes that passed through a stage.", "node", "stage"),
    _gauge("stage_median_seconds", "Median time of a stage's recent runs.", "node", "stage"),
    _gauge("stage_max_seconds", "Time of a stage's longest recent run.", "node", "stage"),
    _gauge("memory_bytes", "Shared memory in use, by purpose.", "node", "purpose"),
    _gauge("memory_need_bytes", "Upper limit of the memory of slots and parity.", "node"),
    _gauge("memory_logs_most_bytes", "Upper limit of the memory of logs.", "node"),
    _gauge("memory_budget_bytes", "Declared limit for all purposes, 0 for none.", "node"),
    _gauge("disk_bytes", "Snapshots spilled to the node's own disk.", "node"),
    _gauge("queue_length", "Waiting requests to other nodes.", "node", "purpose"),
    _gauge(
        "queue_oldest_seconds", "Age of the oldest waiting request to a node.", "node", "purpose"
    ),
    _gauge("log_lag_records", "Records of logs that some copy lacks.", "node"),
    _gauge("log_lag_seconds", "Age of the oldest record of a log that some copy lacks.", "node"),
    _counter("refused_messages", "Messages refused, by reason.", "node", "reason"),
    _gauge("unprotected_snapshots", "Snapshots that cannot be protected just now.", "node"),
    _gauge("checkpoints_failed_in_a_row", "Checkpoints failed since one succeeded.", "node"),
)
"""The metrics that sidecars answer."""

OF_EVENTS: Final = (
    _gauge("job_running", "1 while the job runs, 0 when it is over."),
    _gauge("job_failed", "1 if the job ended before it was complete, else 0."),
    _gauge("step", "Number of complete steps."),
    _gauge("unprotected_steps", "Complete steps that are not protected."),
    _gauge("unprotected_seconds", "Age of the work that a failure would cost now.", "node"),
    _gauge("ranks", "Trainers of the newest generation."),
    _gauge("ranks_wanted", "Trainers that the job wants."),
    _gauge("snapshots_left_out", "Snapshots left out in this generation.", "node"),
    _gauge("stragglers", "Ranks on the node that hold the others up.", "node"),
    _gauge("checkpoint_step", "The step of the newest durable checkpoint."),
    _gauge("checkpoint_timestamp_seconds", "Time of the newest durable checkpoint."),
    _histogram("step_duration_seconds", "Time of a rank for a complete step.", bounds=STEP_BOUNDS),
    _counter("steps_executed", "Steps that rank 0 ran."),
    _counter("steps_repeated", "Steps that rank 0 ran again after a restore."),
    _counter("step_wait_seconds", "Time in steps lost to a cause, over ranks.", "node", "cause"),
    _counter("detections", "Changes that called for a decision.", "node", "what"),
    _counter("node_exits", "Ends of a node's agent while the job went on.", "node"),
    _counter("workers_started", "Worker processes started.", "node", "role"),
    _counter("workers_exited", "Worker processes that ended.", "node", "role"),
    _counter("generations", "Generations proposed."),
    _histogram(
        "recovery_duration_seconds",
        "Time from the detection of a change to the next complete step.",
        "cause",
        bounds=RECOVERY_BOUNDS,
    ),
    _counter("restores", "Restores of a rank, by the farthest source.", "tier"),
    _counter("restored_bytes", "Bytes restored by ranks, by the farthest source.", "tier"),
    _counter("restore_seconds", "Time of ranks in restores, by the farthest source.", "tier"),
    _counter("restore_failures", "Restore points that could not be read."),
    _counter("checkpoints", "Checkpoints that ended, by result.", "result"),
    _counter("checkpoint_seconds", "Time of durable checkpoints, from start to publication."),
    _counter("checkpoint_bytes", "Bytes of durable checkpoints before compression."),
    _counter("checkpoint_retries", "Writes to the store that were tried again."),
    _counter("loss_judgements", "Losses that the loss guard found wrong.", "action"),
    _counter("data_worker_failures", "Failures of data loading processes.", "node", "how"),
    _counter("faults_injected", "Faults that a demo or a chaos run injected."),
    _counter("events_lost", "Events that could not be written.", "node"),
    _counter("rollout_wait_seconds", "Time that rank 0 waited for samples."),
    _counter("sampled_tokens", "Tokens sampled by rollout workers.", "node"),
    _counter("weights_pulled_bytes", "Bytes of weights that rollout workers read.", "node"),
    _counter("weights_refused", "Weights that rollout workers refused.", "node"),
    _counter("sample_violations", "Failed checks of samples."),
    _counter("environment_calls", "Replies of environments.", "node"),
    _counter("environment_failures", "Calls of environments that were given up.", "node"),
    _counter("tides", "Merges with other islands that were adopted."),
    _counter("tide_wait_seconds", "Time that training waited for merges."),
)
"""The metrics that the events give."""

OF_VIEW: Final = (
    _gauge("goodput_ratio", "Productive share of the time between first and last step."),
    _gauge("time_seconds", "Wall time since the start, by its use.", "use"),
)
"""The metrics that follow from the whole course of a run."""

OF_READER: Final = (
    _gauge("read_timestamp_seconds", "Time at which the run directory was read last."),
    _counter("read_errors", "Lines of event files that could not be read."),
)
"""The metrics of the reader itself."""

FAMILIES: Final[Mapping[str, MetricFamily]] = {
    family.name: family for family in (*OF_STATUS, *OF_EVENTS, *OF_VIEW, *OF_READER)
}
"""Every metric by its name."""


def series(family: MetricFamily) -> Iterable[str]:
    """Return the names of a metric's series, as queries write them."""
    if family.kind == "histogram":
        return tuple(family.name + end for end in ("_bucket", "_sum", "_count"))
    return (family.name,)
