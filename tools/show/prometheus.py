"""A job's status in Prometheus' text exposition format, version 0.0.4. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from holdfast.tools.show.node_status import MEMORY, STAGES, NodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """A metric with all its samples: the labels and value of each."""

    name: str
    kind: Literal["gauge", "counter"]
    about: str
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> None:
        """Add a sample; do nothing if ``value`` is None."""
        if value is not None:
            self.samples.append((labels, float(value)))

    def lines(self) -> Iterator[str]:
        """Yield the lines of the metric; none if it has no samples."""
        if not self.samples:
            return
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.samples:
            pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            yield f"{self.name}{{{pairs}}} {value:.15g}"


def exposition(nodes: Sequence[NodeStatus]) -> str:
    """Return the text of all metrics, one family after the other."""
    up = MetricFamily(name="holdfast_up", kind="gauge", about="Whether the node's sidecar answers.")
    for node in nodes:
        up.add(bool(node.status), node=node.node)
    answering = [node for node in nodes if node.status]
    families = [up, *_steps(answering), *_stages(answering), *_memory(answering)]
    families += [*_queues(answering), *_counts(answering)]
    return "".join(f"{line}\n" for family in families for line in family.lines())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _gauge(name: str, about: str) -> MetricFamily:
    return MetricFamily(name=f"holdfast_{name}", kind="gauge", about=about)


def _counter(name: str, about: str) -> MetricFamily:
    return MetricFamily(name=f"holdfast_{name}_total", kind="counter", about=about)


def _steps(nodes: Sequence[NodeStatus]) -> Iterator[MetricFamily]:
    generation = _gauge("generation", "The generation the sidecar guards.")
    age = _gauge("restore_point_age_seconds", "Age of the newest protected step.")
    for node in nodes:
        generation.add(node.generation, node=node.node)
        age.add(node.age_s, node=node.node)
    yield generation
    for what in ("committed", "protected", "durable"):
        family = _gauge(f"{what}_step", f"The newest {what} step.")
        for node in nodes:
            family.add(node.step(what), node=node.node)
        yield family
    yield age


def _stages(nodes: Sequence[NodeStatus]) -> Iterator[MetricFamily]:
    families = {
        "count": _counter("stage_runs", "Number of runs of a stage."),
        "seconds": _counter("stage_seconds", "Total time of a stage."),
        "bytes": _counter("stage_bytes", "Bytes that passed through a stage."),
        "median_s": _gauge(
            "stage_median_seconds", ("Quantiles of the time of a stage's recent runs.")
        ),
        "max_s": _gauge("stage_max_seconds", "Time of a stage's longest recent run."),
    }
    for stage in STAGES:
        for node in nodes:
            for key, value in (node.meter(stage) or {}).items():
                if key in families:
                    families[key].add(value, node=node.node, stage=stage)
    yield from families.values()


def _memory(nodes: Sequence[NodeStatus]) -> Iterator[MetricFamily]:
    used = _gauge("memory_bytes", "Shared memory in use, by purpose.")
    needs = _gauge("memory_need_bytes", "Upper limit of the memory of slots and parity.")
    logs = _gauge("memory_logs_most_bytes", "Upper limit of the memory of logs.")
    budget = _gauge("memory_budget_bytes", "Declared limit for all purposes, 0 for none.")
    disk = _gauge("disk_bytes", "Snapshots spilled to the node's own disk.")
    for node in nodes:
        for purpose in MEMORY:
            used.add(node.nbytes(purpose), node=node.node, purpose=purpose)
        needs.add(node.memory.get("need_bytes"), node=node.node)
        logs.add(node.memory.get("logs_most_bytes"), node=node.node)
        budget.add(node.nbytes("budget"), node=node.node)
        disk.add(node.nbytes("disk"), node=node.node)
    yield from (used, needs, logs, budget, disk)


def _queues(nodes: Sequence[NodeStatus]) -> Iterator[MetricFamily]:
    queued = _gauge("peer_queue_length", "Waiting requests to a peer.")
    oldest = _gauge("peer_queue_oldest_seconds", "Age of the oldest waiting request to a peer.")
    records = _gauge("log_lag_records", "Records of a log that some copy lacks.")
    late = _gauge("log_lag_seconds", "Age of the oldest record that some copy lacks.")
    for node in nodes:
        for (peer, purpose), link in node.peers.items():
            queued.add(link["queued"], node=node.node, peer=peer, purpose=purpose)
            oldest.add(link["oldest_s"], node=node.node, peer=peer, purpose=purpose)
        for name, lag in node.logs.items():
            records.add(lag["records"], node=node.node, log=name)
            late.add(lag["oldest_s"], node=node.node, log=name)
    yield from (queued, oldest, records, late)


def _counts(nodes: Sequence[NodeStatus]) -> Iterator[MetricFamily]:
    refused = _counter("refused_messages", "Messages refused, by reason.")
    unprotected = _gauge("unprotected_snapshots", "Snapshots that cannot be protected just now.")
    failed = _gauge("checkpoints_failed_in_a_row", "Checkpoints that failed since one succeeded.")
    for node in nodes:
        for reason, count in node.refusals.items():
            refused.add(count, node=node.node, reason=reason)
        unprotected.add(len(node.unprotected), node=node.node)
        failed.add(node.status.get("persist_failed_in_a_row"), node=node.node)
    yield from (refused, unprotected, failed)
