"""The nodes that a view shows as lost, late or odd, and the trainers that are ready. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TypeAlias

from holdfast.elastic.membership.incremental import ahead, by_node, by_nodes, once, while_same
from holdfast.elastic.membership.records import (
    TRAINER,
    Decider,
    GenerationRecord,
    NodeRecord,
    Seating,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView, identity, role_of, seat_order

Trainer: TypeAlias = tuple[NodeRecord, WorkerRecord]
"""A worker that can be a rank, and its node."""

_Orders: TypeAlias = Mapping[str, tuple[str, int]]


@by_nodes(lambda view: (view.generation,))
def unmatched_nodes(
    nodes: Iterable[NodeRecord], generation: GenerationRecord | None
) -> dict[str, NodeRecord]:
    """Return the live nodes whose present identity the newest generation does not have.

    They joined since, were restarted, or have no sidecar now.
    """
    known = generation.nodes if generation else {}
    return {
        node.node: node
        for node in nodes
        if not node.sidecar or known.get(node.node) != identity(node)
    }


@once
def living_deciders(view: JobView) -> dict[int, Decider]:
    """Return the deciders that live, by place; others hold theirs until their lease has ended.

    Only the view of an agent that watches tells.
    """
    return {
        place: decider
        for place, decider in view.deciders.items()
        if (node := view.nodes.get(decider.node)) and node.incarnation == decider.incarnation
    }


@once
def lost_nodes(view: JobView) -> Set[str]:
    """Return the nodes of the newest generation's group that are gone."""
    return view.generation.nodes.keys() - view.nodes.keys() if view.generation else set()


@by_nodes(lambda view: (view.generation,))
def late_nodes(
    nodes: Iterable[NodeRecord], generation: GenerationRecord | None
) -> dict[str, NodeRecord]:
    """Return the live nodes with a worker that may still act in the newest generation."""
    number = generation.number if generation else 0
    return {node.node: node for node in nodes if node.fenced < number}


@once
def fenced_nodes(view: JobView) -> Mapping[str, NodeRecord]:
    """Return the live nodes without a worker that acts in the newest generation."""
    late = late_nodes(view)
    if not late:
        return view.nodes
    return {name: node for name, node in view.nodes.items() if name not in late}


@while_same(lambda view: (view.generation,))
def member_incarnations(generation: GenerationRecord | None) -> Set[str]:
    """Return the incarnations of the newest generation's members."""
    return {member.incarnation for member in generation.members} if generation else set()


@while_same(lambda view: (view.seating,))
def _orders(seating: tuple[Seating, ...]) -> _Orders:
    return {order.seat: (order.node, order.attempt) for order in seating}


@while_same(lambda view: (view.seating,))
def _seat_places(seating: tuple[Seating, ...]) -> Mapping[str, int]:
    """Return the index of each seat in seat order."""
    seats = sorted((order.seat for order in seating), key=seat_order)
    return {seat: place for place, seat in enumerate(seats)}


def _parked(node: NodeRecord, orders: _Orders) -> tuple[WorkerRecord, ...] | None:
    """Return the READY trainers of a node whose sidecar serves; None if there are none.

    A worker whose seat was given to another, or to another role, is left out: its agent is about to
    end it.
    """
    found: tuple[WorkerRecord, ...] = ()
    for worker in node.workers if node.sidecar else ():
        if worker.state is WorkerState.READY and role_of(worker.seat) == TRAINER:
            order = orders.get(worker.seat)
            if not orders or (order and order[1] == worker.attempt and order[0] == node.node):
                found = (*found, worker) if found else (worker,)
    return found or None


@ahead()
@by_node(lambda view: (_orders(view),))
def parked_trainers(node: NodeRecord, orders: _Orders) -> tuple[WorkerRecord, ...] | None:
    """Return, by node, the trainers that could enter a generation once their node has fenced."""
    return _parked(node, orders)


@by_node(lambda view: (_orders(view), member_incarnations(view)))
def _parked_outside(
    node: NodeRecord, orders: _Orders, inside: Set[str]
) -> tuple[WorkerRecord, ...] | None:
    for worker in node.workers:
        if worker.incarnation not in inside:
            break
    else:
        return None  # the case of most nodes
    found = _parked(node, orders) or ()
    return tuple([worker for worker in found if worker.incarnation not in inside]) or None


@once
def outside_trainers(view: JobView) -> list[Trainer]:
    """Return the READY trainers that are not in the newest generation."""
    return _of_stage(view, _with_nodes(view, _parked_outside(view)))


@by_nodes()
def _later_stages(nodes: Iterable[NodeRecord]) -> dict[str, int]:
    """Return the nodes with a trainer beyond the first stage, and its stage."""
    gone = WorkerState.DEAD
    return {
        node.node: max(
            worker.spec.stage for worker in node.workers if worker.spec and worker.state is not gone
        )
        for node in nodes
        if any(
            worker.spec is not None and worker.spec.stage and worker.state is not gone
            for worker in node.workers
        )
    }


@once
def newest_stage(view: JobView) -> int:
    """Return the number of the job's present stage."""
    return max(_later_stages(view).values(), default=0)


def _of_stage(view: JobView, found: list[Trainer]) -> list[Trainer]:
    """Leave out the trainers that are still to learn of a newer stage."""
    if not (stage := newest_stage(view)):
        return found
    return [(node, worker) for node, worker in found if worker.spec and worker.spec.stage == stage]


def _with_nodes(view: JobView, found: Mapping[str, Sequence[WorkerRecord]]) -> list[Trainer]:
    nodes = view.nodes
    return [(nodes[name], worker) for name, workers in found.items() for worker in workers]


@once
def ready_trainers(view: JobView) -> list[Trainer]:
    """Return the trainers that can enter the next generation, in seat order.

    These are the READY trainers of the nodes that have fenced the newest generation.
    """
    late, parked = late_nodes(view), parked_trainers(view)
    if late:
        parked = {name: workers for name, workers in parked.items() if name not in late}
    found = _of_stage(view, _with_nodes(view, parked))
    places = _seat_places(view)
    seated: list[Trainer | None] = [None] * len(places)
    for pair in found:
        if (place := places.get(pair[1].seat)) is not None:
            seated[place] = pair
    in_order = [pair for pair in seated if pair is not None]
    if len(in_order) < len(found):  # a worker of no seat, or two of one
        return sorted(found, key=lambda pair: (seat_order(pair[1].seat), pair[1].incarnation))
    return in_order
