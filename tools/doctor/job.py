"""Judgments of a running job: its nodes side by side. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.tools.doctor.facts import UNLIMITED, JobNode
from holdfast.tools.doctor.findings import Finding, failure, fine, warning
from holdfast.tools.terminal import readable

_SKEW_S: Final = 1.0


def judge_job(nodes: Sequence[JobNode]) -> list[Finding]:
    """Return the findings about the nodes of a running job."""
    there = [node for node in nodes if not node.error]
    return [*answers(nodes), versions(there), clocks(there), *memory(there)]


def answers(nodes: Sequence[JobNode]) -> Iterator[Finding]:
    """Yield each node that does not answer, and each thing that a node complains of."""
    fit = [node.node for node in nodes if not node.error and not node.troubles]
    if fit:
        yield fine("nodes", f"{len(fit)} of {len(nodes)} answer and complain of nothing")
    for node in nodes:
        if node.error:
            yield failure(
                "nodes",
                f"{node.node} does not answer: {node.error}",
                why="its snapshots and its parity are out of reach",
                remedy="`holdfast logs RUN_DIR --node` shows its end; look at the machine",
            )
        for trouble in node.troubles:
            yield warning(
                "nodes",
                f"{node.node}: {trouble}",
                why="the job goes on, with less protection or more slowly",
                remedy="docs/how-to/monitor.md explains `holdfast status`, which shows it too",
            )


def versions(nodes: Sequence[JobNode]) -> Finding:
    """Judge whether all nodes run the same versions."""
    found: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        text = ", ".join(f"{name} {version}" for name, version in sorted(node.versions.items()))
        found[text or "unknown"].append(node.node)
    told = "; ".join(f"{', '.join(names)}: {text}" for text, names in found.items())
    if len(found) <= 1:
        return fine("versions", next(iter(found), "no node answers"))
    return failure(
        "versions",
        told,
        why="nodes with different versions compute different bits and may not understand each "
        "other",
        remedy="install the same on all nodes, as by one image, and start the job again",
    )


def clocks(nodes: Sequence[JobNode]) -> Finding:
    """Judge the wall clocks of the nodes against this machine's."""
    known = [(node.node, node.skew_s, node.unsure_s) for node in nodes if node.skew_s is not None]
    off = [(name, skew) for name, skew, unsure in known if abs(skew) > _SKEW_S + unsure]
    if not off:
        most = max((abs(skew) for _, skew, _ in known), default=0.0)
        return fine("clocks", f"within {most:.3f} s of this machine" if known else "not told")
    return warning(
        "clocks",
        ", ".join(f"{name} is {skew:+.1f} s off" for name, skew in off),
        why="events of several nodes stand in a wrong order; leases and limits are not harmed, "
        "as they do not use these clocks",
        remedy="let a time service (chrony, systemd-timesyncd) run on all machines",
    )


def memory(nodes: Sequence[JobNode]) -> Iterator[Finding]:
    """Yield the judgment of each node's memory for snapshots; one line if all is well."""
    judged = [(node, _memory_of(node)) for node in nodes]
    yield from (finding for _, finding in judged if finding is not None)
    most_bytes = max((node.need_bytes for node, finding in judged if finding is None), default=0)
    if most_bytes:
        yield fine("snapshot memory", f"up to {readable(most_bytes)} a node, which it has")


def _memory_of(node: JobNode) -> Finding | None:
    rooms = [node.budget_bytes] if node.budget_bytes else []
    if node.shared_free_bytes != UNLIMITED:
        rooms.append(node.shared_free_bytes + node.held_bytes)
    if not rooms:
        return None
    found = f"{node.node}: needs {readable(node.need_bytes)}, may use {readable(min(rooms))}"
    if node.need_bytes > min(rooms):
        return failure(
            "snapshot memory",
            found,
            why="snapshots are skipped or not protected",
            remedy="enlarge /dev/shm or --memory, lower --parity, or keep fewer snapshots",
        )
    if node.mode == "small":
        return warning(
            "snapshot memory",
            f"{found}, mode small",
            why="no slot can be lent: a step waits while the one before is not protected",
            remedy="enlarge /dev/shm or --memory",
        )
    return None
