"""The reasons for which the newest generation cannot continue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from holdfast.elastic.membership.incremental import by_node, while_same
from holdfast.elastic.membership.readiness import (
    late_nodes,
    lost_nodes,
)
from holdfast.elastic.membership.records import (
    GenerationRecord,
    Member,
    NodeRecord,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning.plan import (
    changed_nodes,
    changes,
)
from holdfast.elastic.planning.reach import clauses_of, parted

_Members = Mapping[str, Sequence[Member]]


def is_stale(view: JobView) -> bool:
    """Return whether the newest generation cannot continue; `faults` gives the reasons."""
    return is_broken(view) or bool(parted(view))


def is_broken(view: JobView) -> bool:
    """Return the same without the nodes' reports about each other."""
    if view.generation is None:
        return False
    fenced = len(late_nodes(view)) < len(view.nodes)
    return bool(fenced or lost_nodes(view) or changed_nodes(view) or _lost_members(view))


def faults(view: JobView) -> list[str]:
    """Return why the newest generation cannot continue, as clauses; none while it can.

    It cannot if a node of its group is gone or was restarted, if two of them do not reach each
    other, if a member's worker is dead or has left it, or if a node has fenced it.
    """
    if view.generation is None:
        return []
    clauses = [*changes(view), *clauses_of(parted(view))]
    lost = [member for members in _lost_members(view).values() for member in members]
    clauses += [_how_lost(view, member) for member in sorted(lost, key=lambda each: each.rank)]
    if not clauses and (fenced := _first_fenced(view)):
        clauses.append(f"node {fenced} fenced generation {view.number}")
    return clauses


def _first_fenced(view: JobView) -> str:
    late = late_nodes(view)
    return next((name for name in view.nodes if name not in late), "")


@while_same(lambda view: (view.generation,))
def _members_at(generation: GenerationRecord | None) -> _Members:
    """Return the members of the newest generation, by node."""
    found: dict[str, list[Member]] = defaultdict(list)
    for member in generation.members if generation else ():
        found[member.node].append(member)
    return dict(found)


def worker_of(node: NodeRecord, member: Member) -> WorkerRecord | None:
    """Return the member's worker if it is still registered."""
    for worker in node.workers:
        if worker.incarnation == member.incarnation:
            return worker
    return None


@by_node(lambda view: (view.generation, _members_at(view)))
def _lost_members(
    node: NodeRecord, generation: GenerationRecord | None, members: _Members
) -> tuple[Member, ...] | None:
    """Return the members that the newest generation has lost, by node.

    Members on lost nodes are skipped: the lost node is reported instead.
    """
    found: tuple[Member, ...] = ()
    for member in members.get(node.node, ()):
        worker = worker_of(node, member)
        if worker is None or worker.state is WorkerState.DEAD or has_left(worker, generation):
            found = (*found, member)
    return found or None


def has_left(worker: WorkerRecord, generation: GenerationRecord | None) -> bool:
    """Return whether a worker has left the generation and waits for a later one."""
    if generation is None or worker.state is not WorkerState.READY:
        return False
    return worker.ready_after >= generation.number


def _how_lost(view: JobView, member: Member) -> str:
    """Return how the newest generation lost a member, as a clause."""
    worker = worker_of(view.nodes[member.node], member)
    if worker is None:
        return f"{member.seat} on {member.node} is gone"
    if worker.state is WorkerState.DEAD:
        ending = f" ({worker.ending})" if worker.ending else ""
        return f"{member.seat} on {member.node} died{ending}"
    return f"{member.seat} on {member.node} left generation {view.number}"
