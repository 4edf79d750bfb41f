"""Which rank a trainer will have when it joins, before anybody has planned it. Pure.

The very code that will place it is asked, with what can be known while the others still train: who
trains where, and that every node holds the blocks of its ranks. A wrong guess costs what was
prepared for it, nothing else.
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
    """Say whether all members of the newest generation work in it."""
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


def foresee(
    roster: Roster,
    *,
    incarnation: str,
    spec: JobSpec,
    point: RestorePoint,
    sizes: Mapping[int, int],
) -> tuple[GenerationRecord, int] | None:
    """Return the generation that worker ``incarnation`` would join now, and its rank there.

    ``point`` is what would be restored, ``sizes`` the payload bytes of its blocks by rank. Workers
    that are starting as well are taken to join at the same time. One that would be a spare is given
    the last rank: it takes anybody's place. None where the worker is not in the roster, or nobody
    trains.
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
    """Return the node's record with the inventory that it will have, as far as plans look at it."""
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
