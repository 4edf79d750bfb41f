"""The samples of the answers of sidecars. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.tools.metrics.families import PREFIX, MetricSample
from holdfast.tools.show.node_status import MEMORY, STAGES, NodeStatus

_METERS: Final = {
    "count": "stage_runs_total",
    "seconds": "stage_seconds_total",
    "bytes": "stage_bytes_total",
    "median_s": "stage_median_seconds",
    "max_s": "stage_max_seconds",
}


def status_samples(nodes: Sequence[NodeStatus]) -> list[MetricSample]:
    """Return the samples of all nodes; what a node does not know has none."""
    return [
        MetricSample(PREFIX + name, (node.node, *labels), float(value))
        for node in nodes
        for name, labels, value in _of(node)
        if value is not None
    ]


def _of(node: NodeStatus) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    yield "up", (), bool(node.status)
    yield "workers", (), len(node.workers)
    yield "unreachable_nodes", (), len(node.unreachable)
    if not node.status:
        return
    yield "generation", (), node.generation
    for kind in ("committed", "protected", "durable"):
        yield f"{kind}_step", (), node.step(kind)
    yield "protected_age_seconds", (), node.age_s
    yield from _stages(node)
    yield from _memory(node)
    yield from _queues(node)
    for reason, count in node.refusals.items():
        yield "refused_messages_total", (reason,), count
    yield "unprotected_snapshots", (), len(node.unprotected)
    yield "checkpoints_failed_in_a_row", (), node.status.get("persist_failed_in_a_row")


def _stages(node: NodeStatus) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    for stage in STAGES:
        for key, value in (node.meter(stage) or {}).items():
            if key in _METERS:
                yield _METERS[key], (stage,), value


def _memory(node: NodeStatus) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    for purpose in MEMORY:
        yield "memory_bytes", (purpose,), node.nbytes(purpose)
    yield "memory_need_bytes", (), node.memory.get("need_bytes")
    yield "memory_logs_most_bytes", (), node.memory.get("logs_most_bytes")
    yield "memory_budget_bytes", (), node.nbytes("budget")
    yield "disk_bytes", (), node.nbytes("disk")


def _queues(node: NodeStatus) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    """Yield the queues to all peers together: one series per peer would be a square of nodes."""
    links = node.peers
    for purpose in sorted({purpose for _, purpose in links}):
        found = [link for (_, each), link in links.items() if each == purpose]
        yield "queue_length", (purpose,), sum(link["queued"] for link in found)
        yield "queue_oldest_seconds", (purpose,), max(link["oldest_s"] for link in found)
    lags = node.logs.values()
    yield "log_lag_records", (), sum(lag["records"] for lag in lags) if lags else None
    yield "log_lag_seconds", (), max((lag["oldest_s"] for lag in lags), default=None)
