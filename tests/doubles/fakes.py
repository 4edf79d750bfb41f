"""Small records for tests: a node, a trainer, a view, a sidecar's inventory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.ckpt.memory.records import (
    BlockEntry,
    BlockSource,
    Inventory,
    ParityEntry,
    RestorePoint,
    SidecarPeer,
    SnapshotWorld,
)
from holdfast.ckpt.parity.stripes import Geometry
from holdfast.elastic.membership.records import (
    GenerationRecord,
    JobOutcome,
    JobSpec,
    Member,
    MeshSize,
    NodeRecord,
    Origin,
    Seating,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView, identity
from holdfast.elastic.planning.plan import extend_timeline

RUN = "run"


def worker(
    seat: str,
    state: WorkerState = WorkerState.READY,
    *,
    incarnation: str = "",
    attempt: int = 1,
    ready_after: int = 0,
    spec: JobSpec | None = None,
    ending: str = "",
) -> WorkerRecord:
    """Return a worker's record; its incarnation follows from seat and attempt."""
    return WorkerRecord(
        seat=seat,
        incarnation=incarnation or f"{seat}@{attempt}",
        pid=1,
        state=state,
        attempt=attempt,
        ready_after=ready_after,
        spec=spec or JobSpec(),
        ending=ending,
    )


def node(
    name: str,
    *workers: WorkerRecord,
    fenced: int = 0,
    inventory: Inventory | None = None,
    slots: Mapping[str, int] | None = None,
    sidecar: bool = True,
    sidecar_starts: int = 1,
    incarnation: str = "",
    unreachable: Iterable[str] = (),
) -> NodeRecord:
    """Return a node's record; ``unreachable`` names nodes made by this function with defaults."""
    return NodeRecord(
        node=name,
        incarnation=incarnation or f"{name}#1",
        domain=name,
        sidecar=f"sim://{name}/{sidecar_starts}" if sidecar else "",
        slots=dict(slots or {"trainer": 2}),
        workers=workers,
        fenced=fenced,
        inventory=inventory,
        sidecar_starts=sidecar_starts,
        unreachable={other: f"{other}#1/1" for other in unreachable},
    )


def view(
    *nodes: NodeRecord,
    generation: GenerationRecord | None = None,
    seating: Iterable[Seating] = (),
    wanted: Mapping[str, int] | None = None,
    outcome: JobOutcome | None = None,
) -> JobView:
    """Return a view of the nodes; records that exist have revision 1."""
    seats = tuple(seating)
    return JobView(
        run=RUN,
        nodes={record.node: record for record in sorted(nodes, key=lambda each: each.node)},
        wanted=wanted or {"trainer": 2},
        generation=generation,
        generation_revision=1 if generation else 0,
        seating=seats,
        seating_revision=1 if seats else 0,
        outcome=outcome,
    )


def generation(
    number: int,
    nodes: Sequence[NodeRecord],
    *,
    ranks: Sequence[tuple[str, WorkerRecord]],
    timeline: Sequence[Origin] = (),
    restore: RestorePoint | None = None,
    parity: int = 1,
) -> GenerationRecord:
    """Return the record of a generation of these nodes whose ranks are (node, worker)."""
    world = SnapshotWorld(
        run=RUN,
        generation=number,
        peers=tuple(SidecarPeer(node=each.node, address=each.sidecar) for each in nodes),
        rank_nodes=tuple(name for name, _ in ranks),
        parity=min(parity, len(nodes) - 1),
        keep=2,
    )
    return GenerationRecord(
        number=number,
        members=tuple(
            Member(rank=rank, seat=each.seat, node=name, incarnation=each.incarnation)
            for rank, (name, each) in enumerate(ranks)
        ),
        snapshots=world,
        restore=restore,
        reason="because",
        nodes={each.node: identity(each) for each in nodes},
        mesh=MeshSize(dp=len(ranks)),
        timeline=tuple(timeline)
        or extend_timeline((), Origin(generation=number, step=restore.step if restore else -1)),
    )


def held(world: SnapshotWorld, step: int) -> RestorePoint:
    """Return a restore point whose blocks are all on the nodes that wrote them."""
    sources = (BlockSource(rank=r, node=name) for r, name in enumerate(world.rank_nodes))
    return RestorePoint(world=world, step=step, sources=tuple(sources))


def inventory(name: str, world: SnapshotWorld, *steps: int) -> Inventory:
    """Return the inventory of the node's sidecar for a group's protected steps."""
    blocks: list[BlockEntry] = []
    sealed: list[BlockEntry] = []
    parities: list[ParityEntry] = []
    for step in steps:
        entries = {
            rank: BlockEntry(
                generation=world.generation,
                step=step,
                rank=rank,
                payload_bytes=1000 + rank,
                index_bytes=96,
                index_crc32c=0,
            )
            for rank in range(len(world.rank_nodes))
        }
        sealed += entries.values()
        blocks += [entry for rank, entry in entries.items() if world.rank_nodes[rank] == name]
        geometry = Geometry(world, entries)
        parities += [
            ParityEntry(
                generation=world.generation,
                step=step,
                stripe=stripe,
                row=row,
                nbytes=geometry.row_bytes(stripe),
                crc32c=0,
            )
            for stripe, row in geometry.rows_of(name)
        ]
    return Inventory(
        node=name,
        worlds=(world,),
        blocks=tuple(blocks),
        parities=tuple(parities),
        sealed=tuple(sealed),
    )
