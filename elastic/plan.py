"""The next generation from a view: ranks, snapshot group, restore point, and the reason. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckpt.groups import form_groups
from ckpt.world import Inventory, RestorePoint, SidecarPeer, SnapshotWorld
from elastic.membership import View, fenced_nodes, identity, ready_trainers
from elastic.records import (
    GenerationRecord,
    JobSpec,
    Member,
    NodeRecord,
    Origin,
    WorkerRecord,
)

RestorePoints = Callable[[Sequence[Inventory]], tuple[list[RestorePoint], str]]
"""Find every step that the inventories can restore, newest first, and why not others."""

MAX_TIMELINE = 64
MAX_FALLBACKS = 4
_NAMED_RANKS = 8


def plan(
    view: View, *, restore_points: RestorePoints | None = None
) -> tuple[GenerationRecord, str]:
    """Return the record of generation ``view.number + 1`` and its one-paragraph reason.

    Every READY trainer takes part (at most ``dp`` of them); there must be one. Survivors keep
    their ranks where the world size stays, else their order. All live nodes with a sidecar
    guard the snapshots, in parity groups over their failure domains. ``restore_points`` is
    ``ckpt.stripes.restore_points`` unless a test says otherwise.
    """
    ready = ready_trainers(view)
    spec = job_spec(ready)
    members = _members(_chosen(ready, view=view, spec=spec), view=view)
    number = view.number + 1
    nodes = {name: node for name, node in fenced_nodes(view).items() if node.sidecar}
    world, survives = _world(view, members=members, spec=spec, nodes=nodes)
    points, restore_reason = choose_restore(view, restore_points=restore_points)
    restore = points[0] if points else None
    reason = f"{_reason(view, members=members, spec=spec)}; {survives}"
    reason = f"{reason}; {_restore_reason(restore, members=members, nodes=nodes) or restore_reason}"
    record = GenerationRecord(
        number=number,
        members=members,
        snapshots=world,
        restore=restore,
        fallbacks=tuple(points[1 : 1 + MAX_FALLBACKS]),
        reason=reason,
        nodes={name: identity(node) for name, node in nodes.items()},
        timeline=extend_timeline(
            view.generation.timeline if view.generation else (),
            Origin(generation=number, step=restore.step if restore else -1),
        ),
    )
    return record, reason


def _world(
    view: View, *, members: Sequence[Member], spec: JobSpec, nodes: Mapping[str, NodeRecord]
) -> tuple[SnapshotWorld, str]:
    """Return who guards the snapshots, and what losses they survive.

    Parity that the nodes do not allow is lowered, and the reason says so.
    """
    parity = min(spec.parity, len(nodes) - 1)
    columns = min(spec.columns, len(nodes) - parity) if parity else 0
    groups, survives = form_groups(
        {name: node.domain for name, node in nodes.items()},
        parity=parity,
        size=spec.parity_group,
        columns=columns,
        previous=view.generation.snapshots.parity_groups() if view.generation else (),
    )
    world = SnapshotWorld(
        run=view.run,
        generation=view.number + 1,
        peers=tuple(
            SidecarPeer(node=name, address=node.sidecar, domain=node.domain)
            for name, node in nodes.items()
        ),
        rank_nodes=tuple(member.node for member in members),
        parity=parity,
        keep=spec.keep,
        groups=groups,
        columns=columns,
        memory_bytes=spec.memory_bytes,
    )
    if spec.parity > parity:
        lowered = f"parity {spec.parity} was asked, {len(nodes)} nodes allow {parity}"
        return world, f"{lowered}: {survives}"
    return world, survives


def job_spec(ready: Sequence[tuple[NodeRecord, WorkerRecord]]) -> JobSpec:
    """Return what the trainers ask for (the first one's word; `agree` refuses a discord)."""
    return next((worker.spec for _, worker in ready if worker.spec), JobSpec())


def choose_restore(
    view: View, *, restore_points: RestorePoints | None = None
) -> tuple[list[RestorePoint], str]:
    """Return the restore points on the surviving timeline, newest first, or none and why."""
    if view.generation is None:
        return [], "nothing to restore yet"
    inventories = [node.inventory for node in fenced_nodes(view).values() if node.inventory]
    points, why = (restore_points or _stripes_restore_points())(inventories)
    timeline = view.generation.timeline
    valid = [
        point
        for point in points
        if on_timeline(point.world.generation, step=point.step, timeline=timeline)
    ]
    if valid:
        newest_first = sorted(
            valid, key=lambda point: (point.step, point.world.generation), reverse=True
        )
        return newest_first, ""
    if points:
        why = (
            f"step {points[0].step} of generation {points[0].world.generation} belongs to a "
            "future that was rolled back"
        )
    durable = max((inventory.durable for inventory in inventories), default=-1)
    which = f"step {durable}, or a newer one" if durable >= 0 else "if there is one"
    reason = f"restores nothing from memory: the newest checkpoint is loaded, {which}"
    return [], f"{reason} ({why})" if why else reason


def on_timeline(generation: int, *, step: int, timeline: Sequence[Origin]) -> bool:
    """Say whether a snapshot lies in the past of the newest generation.

    It does unless a later generation went on from an earlier step: then the work behind that
    step was done again, and the snapshot shows a future that never came.
    """
    return all(step <= origin.step for origin in timeline if origin.generation > generation)


def extend_timeline(timeline: Sequence[Origin], newest: Origin) -> tuple[Origin, ...]:
    """Append an origin, dropping those it makes redundant; bounded by `MAX_TIMELINE`.

    An origin is redundant when a later one went on from the same or an earlier step. Where the
    bound forces one out, its successor disowns everything before itself instead.
    """
    kept = [origin for origin in timeline if origin.step < newest.step]
    kept.append(newest)
    if len(kept) > MAX_TIMELINE:
        kept = kept[-MAX_TIMELINE:]
        kept[0] = Origin(generation=kept[0].generation, step=-1)
    return tuple(kept)


def _stripes_restore_points() -> RestorePoints:
    from ckpt.stripes import restore_points

    return restore_points


def _chosen(
    ready: Sequence[tuple[NodeRecord, WorkerRecord]], *, view: View, spec: JobSpec
) -> list[tuple[NodeRecord, WorkerRecord]]:
    """Return the trainers that take part: those of the old generation by rank, then by seat."""
    old = view.generation.members if view.generation else ()
    ranks = {member.incarnation: member.rank for member in old}
    ordered = sorted(ready, key=lambda pair: ranks.get(pair[1].incarnation, len(ranks)))
    return ordered if spec.dp is None else ordered[: spec.dp]


def _members(
    chosen: Sequence[tuple[NodeRecord, WorkerRecord]], *, view: View
) -> tuple[Member, ...]:
    """Give each its rank: where the world size stays, newcomers fill the holes of the lost.

    A newcomer on the node of a lost rank takes that rank: its block is there.
    """
    old = view.generation.members if view.generation else ()
    size = len(chosen)
    places: list[tuple[NodeRecord, WorkerRecord] | None] = [None] * size
    rest = list(chosen)
    if len(old) == size:
        by_incarnation = {pair[1].incarnation: pair for pair in chosen}
        for member in old:
            places[member.rank] = by_incarnation.get(member.incarnation)
        kept = {pair[1].incarnation for pair in places if pair}
        rest = [pair for pair in chosen if pair[1].incarnation not in kept]
        for member in old:
            at_home = [pair for pair in rest if pair[0].node == member.node]
            if places[member.rank] is None and at_home:
                places[member.rank] = at_home[0]
                rest.remove(at_home[0])
    fill = iter(rest)
    return tuple(
        Member(
            rank=rank,
            seat=worker.seat,
            node=node.node,
            incarnation=worker.incarnation,
            info=worker.info,
        )
        for rank, (node, worker) in enumerate(place or next(fill) for place in places)
    )


def _reason(view: View, *, members: Sequence[Member], spec: JobSpec) -> str:
    old = view.generation
    known = {member.incarnation for member in old.members} if old else set()
    kept = [m for m in members if m.incarnation in known]
    new = [m for m in members if m.incarnation not in known]
    wanted = spec.dp or max(view.wanted.get("trainer", 0), len(members))
    who = _listing([f"{m.node}/{m.seat} kept" for m in kept], "kept") + _listing(
        [f"{m.node}/{m.seat} new" for m in new], "new"
    )
    parts = [
        f"generation {view.number + 1}: {len(members)} of {wanted} trainers ({', '.join(who)})"
    ]
    if old:
        parts += changes(view)
    return "; ".join(parts)


def changes(view: View) -> list[str]:
    """Return what happened to the nodes and members of the newest generation, as clauses."""
    if (old := view.generation) is None:
        return []
    clauses: list[str] = []
    for name, was in old.nodes.items():
        now = view.nodes.get(name)
        if now is None:
            clauses.append(f"node {name} was lost")
        elif not now.sidecar:
            clauses.append(f"the sidecar of node {name} is down")
        elif identity(now) != was:
            clauses.append(f"node {name} was started again (its agent or sidecar ended)")
    return clauses


def _listing(names: Sequence[str], word: str) -> list[str]:
    return list(names) if len(names) <= _NAMED_RANKS else [f"{len(names)} {word}"]


def _restore_reason(
    restore: RestorePoint | None, *, members: Sequence[Member], nodes: Mapping[str, NodeRecord]
) -> str:
    if restore is None:
        return ""
    held = [source for source in restore.sources if not source.rebuilt]
    rebuilt = [source for source in restore.sources if source.rebuilt]
    parts = _listing([f"rank {s.rank} from node {s.node}'s arena" for s in held], "from arenas")
    parts += _listing(
        [f"rank {s.rank} rebuilt on {s.node} from parity" for s in rebuilt], "rebuilt from parity"
    )
    saved = restore.world
    text = f"restores step {restore.step} of generation {saved.generation}: {', '.join(parts)}"
    if len(saved.rank_nodes) != len(members):
        return f"{text}, resharded from {len(saved.rank_nodes)} ranks to {len(members)}"
    sizes = _block_sizes(restore, nodes=nodes)
    moved = sum(sizes.get(s.rank, 0) for s in held if members[s.rank].node != s.node)
    moved += sum(sizes.get(s.rank, 0) for s in rebuilt)
    return f"{text}, {moved} bytes move" if sizes else text


def _block_sizes(restore: RestorePoint, *, nodes: Mapping[str, NodeRecord]) -> dict[int, int]:
    """Return the size of every rank's block, as far as the inventories know it."""
    sizes: dict[int, int] = {}
    key = (restore.world.generation, restore.step)
    for node in nodes.values():
        if node.inventory is None:
            continue
        for entries in (node.inventory.sealed, node.inventory.blocks):
            for entry in entries:
                if (entry.generation, entry.step) == key:
                    sizes[entry.rank] = entry.payload_bytes
        if len(sizes) == len(restore.sources):
            break
    return sizes
