"""Prediction of the rank that a trainer will have when it joins. Pure.

It calls the same planning code that will place the trainer, with the facts known while the others
still train: the trainers' nodes, and that every node holds the blocks of its ranks. A wrong
prediction costs only the preparation for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast.ckpt.memory.records import BlockEntry, Inventory, RestorePoint
from holdfast.elastic.membership.records import (
    TRAINER,
    GenerationRecord,
    JobSpec,
    NodeRecord,
    Roster,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import role_of
from holdfast.elastic.planning.holdings import BlockHoldings, saved_mesh
from holdfast.elastic.planning.meshes import choose_mesh
from holdfast.elastic.planning.placing import Placer, Trainer, members_of


def others_train(roster: Roster) -> bool:
    """Return whether all members of the newest generation work in it."""
    generation = roster.generation
    if generation is None:
        return False
    nodes = {node.node: node for node in roster.nodes}
    fenced = any(node.fenced >= generation.number for node in roster.nodes)
    return not fenced and all(
        member.node in nodes
        and any(
            worker.incarnation == member.incarnation and worker.state is WorkerState.ACTIVE
            for worker in nodes[member.node].workers
        )
        for member in generation.members
    )


def knows(roster: Roster, *, incarnation: str) -> bool:
    """Return whether a worker is in the roster, as a trainer that lives."""
    return any(worker.incarnation == incarnation for _, worker in _trainers(roster))


def foresee(
    roster: Roster,
    *,
    incarnation: str,
    spec: JobSpec,
    point: RestorePoint,
    sizes: Mapping[int, int],
) -> tuple[GenerationRecord, int] | None:
    """Return the generation that worker ``incarnation`` would join now, and its rank there.

    ``point`` is the restore point, ``sizes`` the payload bytes of its blocks by rank. Other
    starting workers are assumed to join at the same time. A worker that would be a spare gets the
    last rank, because it can replace any rank. None if the worker is not in the roster, or no
    worker trains.
    """
    generation = roster.generation
    me = next((pair for pair in _trainers(roster) if pair[1].incarnation == incarnation), None)
    if generation is None or me is None:
        return None
    ready = _trainers(roster)
    mesh, _ = choose_mesh(spec, trainers=len(ready))
    if mesh is None:
        return None
    nodes = {node.node: _holding(node, point, sizes) for node in roster.nodes}
    saved = saved_mesh(point, known={generation.number: generation.mesh})
    holdings = BlockHoldings(point, nodes=nodes, saved=saved, mesh=mesh)
    placement = Placer(mesh, old=generation, holdings=holdings if holdings.known else None)
    members = members_of(placement.place(ready).ranks)
    rank = next((m.rank for m in members if m.incarnation == incarnation), mesh.ranks - 1)
    record = msgspec.structs.replace(
        generation,
        number=generation.number + 1,
        members=members,
        restore=point,
        mesh=mesh,
        shares=(),
        reason="foreseen",
    )
    return record, rank


def _trainers(roster: Roster) -> list[Trainer]:
    return [
        (node, worker)
        for node in roster.nodes
        for worker in node.workers
        if role_of(worker.seat) == TRAINER and _lives(worker)
    ]


def _lives(worker: WorkerRecord) -> bool:
    return worker.state not in (WorkerState.DEAD, WorkerState.DONE)


def _holding(node: NodeRecord, point: RestorePoint, sizes: Mapping[int, int]) -> NodeRecord:
    """Return the node's record with its expected inventory, as far as plans use it."""
    blocks = tuple(
        BlockEntry(
            generation=point.world.generation,
            step=point.step,
            rank=source.rank,
            payload_bytes=sizes[source.rank],
            index_bytes=0,
            index_crc32c=0,
        )
        for source in point.sources
        if source.node == node.node and not source.rebuilt and source.rank in sizes
    )
    inventory = Inventory(
        node=node.node, worlds=(point.world,), blocks=blocks, parities=(), sealed=()
    )
    return msgspec.structs.replace(node, inventory=inventory)
