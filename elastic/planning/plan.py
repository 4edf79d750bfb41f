"""The next generation from a view: ranks, snapshot group, restore point, and the reason. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import TypeVar

from holdfast.ckpt.memory.records import Inventory, RestorePoint, SidecarPeer, SnapshotWorld
from holdfast.ckpt.parity.groups import Groups, form_groups
from holdfast.elastic.membership.incremental import ahead, by_nodes, once, while_same
from holdfast.elastic.membership.readiness import (
    fenced_nodes,
    late_nodes,
    lost_nodes,
    member_incarnations,
    newest_stage,
    ready_trainers,
    unmatched_nodes,
)
from holdfast.elastic.membership.records import (
    REPLACEABLE,
    REPLICATED_BYTES,
    RESTORE_AT_MOST,
    GenerationRecord,
    JobSpec,
    Member,
    MeshSize,
    NodeRecord,
    Origin,
    Setback,
    WorkerRecord,
)
from holdfast.elastic.membership.view import JobView, identity
from holdfast.elastic.planning.holdings import BlockHoldings, saved_mesh
from holdfast.elastic.planning.inventories import whole
from holdfast.elastic.planning.meshes import choose_mesh
from holdfast.elastic.planning.neighbors import lost_places, needs_of, without_lost
from holdfast.elastic.planning.placing import Placement, Placer, Trainer, members_of
from holdfast.elastic.planning.reach import left_out, why_left_out
from holdfast.elastic.planning.shares import alongside, by_speed, even

RestorePoints = Callable[[Sequence[Inventory]], tuple[list[RestorePoint], str]]
"""Function that finds the steps that inventories can restore, newest first, and why not others."""

_T = TypeVar("_T")

MAX_TIMELINE = 64
MAX_FALLBACKS = 4
_NAMED_RANKS = 8
_NO_SPEC = JobSpec()


def plan(
    view: JobView,
    *,
    restore_points: RestorePoints | None = None,
    excluded: Collection[str] = (),
    setbacks: Mapping[str, Setback] | None = None,
) -> tuple[GenerationRecord, str]:
    """Return the record of generation ``view.number + 1`` and its one-paragraph reason.

    The READY trainers form the mesh that `choose_mesh` finds for them; they must be enough. The
    others are spares. Ranks are placed so that the fewest bytes move; on a tie, survivors keep
    their ranks. All live nodes with a sidecar guard the snapshots, in parity groups over their
    failure domains. Nodes that others do not reach (`reach.left_out`) are left out. Those that are
    ``excluded`` are left out too, unless the job cannot continue without them or would continue
    from an earlier step. ``restore_points`` is ``holdfast.ckpt.parity.stripes.restore_points``
    except in tests; ``setbacks`` are those for the record.
    """
    everyone, view = view, _in_reach(view) if left_out(view) else view
    excluded = [name for name in excluded if name in view.nodes]
    points, restore_reason, excluded = _restore_without(
        view, excluded, restore_points=restore_points
    )
    ready = [pair for pair in ready_trainers(view) if pair[0].node not in excluded]
    spec = job_spec(ready)
    mesh, mesh_reason = choose_mesh(spec, trainers=len(ready))
    if mesh is None:
        raise ValueError(f"there is nothing to plan: {mesh_reason}")
    left = view.without(set(excluded)) if excluded else view
    points, why_not = _without_lost(left, points, ready=ready, spec=spec)
    restore = points[0] if points else None
    before = _before(view, restore)
    nodes = {
        name: node
        for name, node in fenced_nodes(view).items()
        if node.sidecar and name not in excluded
    }
    holdings = _holdings(view, restore, mesh=mesh, ready=ready)
    placement = Placer(mesh, old=view.generation, holdings=holdings).place(ready)
    members = members_of(placement.ranks)
    world, survives = _world(view, members=members, spec=spec, nodes=nodes, mesh=mesh)
    shares, share_reason = _shares(view, placement.ranks, mesh=mesh, spec=spec)
    clauses = [
        _reason(view, members=members, spec=spec),
        *changes(everyone),
        _mesh_reason(mesh_reason, placement, mesh=mesh, spares=len(ready) - mesh.ranks),
        share_reason,
        why_left_out(everyone),
        f"{_listed(sorted(excluded))} excluded after repeated losses" if excluded else "",
        survives,
        _restore_reason(restore, members=members, holdings=holdings) or restore_reason,
        why_not,
        "a newer checkpoint comes first, if there is one" if before else "",
    ]
    reason = "; ".join(clause for clause in clauses if clause)
    known = view.generation.nodes if view.generation else {}
    unmatched = unmatched_nodes(view)
    record = GenerationRecord(
        number=view.number + 1,
        members=members,
        snapshots=world,
        restore=restore,
        fallbacks=tuple(points[1 : 1 + MAX_FALLBACKS]),
        before=before,
        reason=reason,
        nodes={
            name: known[name] if name not in unmatched else identity(node)
            for name, node in nodes.items()
        },
        timeline=extend_timeline(
            view.generation.timeline if view.generation else (),
            Origin(generation=view.number + 1, step=restore.step if restore else -1),
        ),
        mesh=mesh,
        shares=shares,
        setbacks=dict(setbacks or {}),
    )
    return record, reason


@once
def _in_reach(view: JobView) -> JobView:
    """Return the view without the nodes that are left out because others do not reach them."""
    return view.without(left_out(view).keys())


def _restore_without(
    view: JobView, excluded: Collection[str], *, restore_points: RestorePoints | None
) -> tuple[list[RestorePoint], str, Collection[str]]:
    """Return the restore points, why no others, and the nodes that the plan can do without."""
    points, reason = choose_restore(view, restore_points=restore_points)
    if not excluded:
        return points, reason, ()
    ready = ready_trainers(view)
    left = [pair for pair in ready if pair[0].node not in excluded]
    if len(left) < job_spec(ready).least:
        return points, reason, ()
    others, why = choose_restore(view.without(set(excluded)), restore_points=restore_points)
    newest = points[0].step if points else -1
    if newest > (others[0].step if others else -1):
        return points, reason, ()
    return others, why, excluded


def _without_lost(
    view: JobView, points: list[RestorePoint], *, ready: Sequence[Trainer], spec: JobSpec
) -> tuple[list[RestorePoint], str]:
    """Return the points, first one that does without lost stages if all others are too old.

    The second value says why there is none, where stages are lost that nothing can replace.
    """
    old = view.generation
    if spec.beyond is None or old is None or old.snapshots.stage != spec.stage or _limits(view):
        return points, ""
    from holdfast.ckpt.parity.stripes import remnants

    told = (worker.info.get(REPLACEABLE) for _, worker in ready)
    found, why = without_lost(
        points,
        [
            each
            for each in remnants(_usable_inventories(view))
            if on_timeline(each.world.generation, step=each.step, timeline=old.timeline)
        ],
        needs=needs_of(next(filter(None, told), None)),
        beyond=spec.beyond,
    )
    return (points, why) if found is None else ([found, *points], "")


def _replicated_bytes(ready: Sequence[Trainer]) -> int:
    """Return the bytes of a rank's state that its replicas share, as the trainers report."""
    reported = [worker.info.get(REPLICATED_BYTES, 0) for _, worker in ready if worker.info]
    return max([each for each in reported if isinstance(each, int)], default=0)


def _holdings(
    view: JobView, restore: RestorePoint | None, *, mesh: MeshSize, ready: Sequence[Trainer]
) -> BlockHoldings | None:
    """Return the nodes' holdings of the restore point, None if they are not known."""
    if restore is None or view.generation is None:
        return None
    saved = saved_mesh(restore, known={view.number: view.generation.mesh})
    found = BlockHoldings(
        restore,
        nodes=fenced_nodes(view),
        saved=saved,
        mesh=mesh,
        replicated_bytes=_replicated_bytes(ready),
    )
    return found if found.known else None


def _shares(
    view: JobView, ranks: Sequence[Trainer], *, mesh: MeshSize, spec: JobSpec
) -> tuple[tuple[int, ...], str]:
    """Return the groups' shares, by each group's slowest rank; empty: even shares.

    Groups that share experts run their microbatches at the same time, so they have equal shares.
    """
    if not 0 < mesh.dp <= spec.microbatches:
        return (), ""
    speeds = [worker.speed for _, worker in ranks]
    if not any(speeds):
        return (), ""
    size, rounds = mesh.ep * mesh.cell, spec.microbatches // mesh.ep
    groups = [min(speeds[at : at + size]) for at in range(0, mesh.ranks, size)]
    old = view.generation
    same = old is not None and [member.incarnation for member in old.members] == [
        worker.incarnation for _, worker in ranks
    ]
    previous = old.shares[:: mesh.ep] if old and same else ()
    shares, reason = by_speed(rounds, groups, previous=previous)
    if shares == even(rounds, len(groups)):
        return (), ""
    return alongside(shares, mesh.ep), reason


def _mesh_reason(reason: str, placement: Placement, *, mesh: MeshSize, spares: int) -> str:
    """Return the reason for the placement of ranks, if there is one."""
    clauses = []
    if mesh.near > 1:
        cells = mesh.ranks // mesh.near
        where = f"{placement.on_nodes} of {cells} groups within a node"
        clauses += [reason, f"{where}, {placement.in_domains} within a failure domain"]
    if spares:
        clauses.append(f"{spares} trainer{'s' * (spares > 1)} spare")
    return ", ".join(clauses)


def _world(
    view: JobView,
    *,
    members: Sequence[Member],
    spec: JobSpec,
    nodes: Mapping[str, NodeRecord],
    mesh: MeshSize,
) -> tuple[SnapshotWorld, str]:
    """Return the group that guards the snapshots, and the losses that they survive.

    If there are too few nodes for the parity, it is lowered, and the reason says so.
    """
    parity, columns = _strength(spec, len(nodes))
    domains = _domains(view)
    if spec is some_spec(view) and domains.keys() == nodes.keys():
        groups, survives = _groups(view)
    else:
        domains = {name: node.domain for name, node in nodes.items()}
        groups, survives = _grouped(domains, spec, view.generation)
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
        stage=spec.stage,
        pp=mesh.pp,
        tp=mesh.tp,
    )
    if spec.parity > parity:
        lowered = f"parity {spec.parity} was asked, {len(nodes)} nodes allow {parity}"
        return world, f"{lowered}: {survives}"
    return world, survives


@ahead()
@by_nodes()
def _domains(nodes: Iterable[NodeRecord]) -> dict[str, str]:
    """Return the failure domains of the nodes that can guard snapshots."""
    return {node.node: node.domain for node in nodes if node.sidecar}


@once
def requested_spec(view: JobView) -> JobSpec:
    """Return the spec of the READY trainers."""
    return job_spec(ready_trainers(view))


@once
def some_spec(view: JobView) -> JobSpec:
    """Return the spec of the first node's trainers of the present stage, ready or not."""
    stage = newest_stage(view)
    specs = (worker.spec for _, worker in view.workers() if worker.spec is not None)
    return next((spec for spec in specs if spec.stage == stage), _NO_SPEC)


def _are_few_awaited(view: JobView) -> bool:
    """Return whether most nodes have fenced the newest generation; a plan follows soon."""
    late = late_nodes(view)
    return 0 < 2 * len(late) <= len(view.nodes) and bool(_domains(view))


@ahead(_are_few_awaited)
@while_same(lambda view: (_domains(view), some_spec(view), view.generation))
def _groups(
    domains: Mapping[str, str], spec: JobSpec, old: GenerationRecord | None
) -> tuple[Groups, str]:
    return _grouped(domains, spec, old)


def _grouped(
    domains: Mapping[str, str], spec: JobSpec, old: GenerationRecord | None
) -> tuple[Groups, str]:
    """Return the parity groups of these nodes, and the losses that they survive."""
    parity, columns = _strength(spec, len(domains))
    return form_groups(
        domains,
        parity=parity,
        size=spec.parity_group,
        columns=columns,
        previous=old.snapshots.parity_groups() if old else (),
    )


def _strength(spec: JobSpec, nodes: int) -> tuple[int, int]:
    """Return the parity and the columns that this number of nodes allows."""
    parity = min(spec.parity, nodes - 1)
    return parity, min(spec.columns, nodes - parity) if parity else 0


def weigh(view: JobView) -> int:
    """Return the number of restorable steps; this is about half of the work of a plan.

    It also computes the ready trainers and the parity groups; `plan` reuses all of it.
    """
    if left_out(view):
        view = _in_reach(view)
    ready_trainers(view)
    if _domains(view):
        _groups(view)
    return len(_restorable(view)[0])


def job_spec(ready: Sequence[tuple[NodeRecord, WorkerRecord]]) -> JobSpec:
    """Return the trainers' spec (the first one's; `agree` refuses differing ones)."""
    return next((worker.spec for _, worker in ready if worker.spec), _NO_SPEC)


def choose_restore(
    view: JobView, *, restore_points: RestorePoints | None = None
) -> tuple[list[RestorePoint], str]:
    """Return the restore points on the valid timeline, newest first, or none and the reason."""
    if view.generation is None:
        return [], "nothing to restore yet"
    points, why = (
        _restorable(view) if restore_points is None else restore_points(_usable_inventories(view))
    )
    if view.generation.snapshots.stage != (stage := requested_spec(view).stage):
        return [], f"stage {stage} of the script begins: the newest checkpoint is loaded, if any"
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
        return _old_enough(newest_first, view=view), ""
    if points:
        why = (
            f"step {points[0].step} of generation {points[0].world.generation} belongs to a "
            "future that was rolled back"
        )
    durable = max((inventory.durable for inventory in _usable_inventories(view)), default=-1)
    which = f"step {durable}, or a newer one" if durable >= 0 else "if there is one"
    reason = f"restores nothing from memory: the newest checkpoint is loaded, {which}"
    return [], f"{reason} ({why})" if why else reason


@by_nodes()
def _inventories(nodes: Iterable[NodeRecord]) -> dict[str, Inventory]:
    """Return the inventories that the nodes have published."""
    return {node.node: node.inventory for node in nodes if node.inventory is not None}


@while_same(lambda view: (_inventories(view), late_nodes(view), view.generation))
def _usable_inventories(
    inventories: Mapping[str, Inventory], late: Container[str], old: GenerationRecord | None
) -> list[Inventory]:
    """Return the inventories of nodes without a worker that acts in the newest generation."""
    return whole([each for name, each in inventories.items() if name not in late], old)


@while_same(lambda view: (_usable_inventories(view),))
def _restorable(inventories: list[Inventory]) -> tuple[list[RestorePoint], str]:
    """Return the restore points that `stripes.restore_points` finds, computed once."""
    from holdfast.ckpt.parity.stripes import restore_points

    return restore_points(inventories)


def _old_enough(points: list[RestorePoint], *, view: JobView) -> list[RestorePoint]:
    """Leave out points newer than the step to which trainers asked to roll back.

    If no point is old enough, return the oldest.
    """
    limits = _limits(view)
    if not limits:
        return points
    old = [point for point in points if point.step <= min(limits)]
    return old or points[-1:]


def _limits(view: JobView) -> list[int]:
    """Return the steps to which trainers asked to roll back."""
    back = _going_back(view)
    if not back:
        return []
    return [
        most
        for node, worker in ready_trainers(view)
        if node.node in back
        and isinstance(most := worker.info.get(RESTORE_AT_MOST), int)
        and worker.ready_after == view.number
    ]


def _before(view: JobView, restore: RestorePoint | None) -> tuple[Origin, ...]:
    """Return the timeline until now if ``restore`` may be older than the newest complete step.

    It may be if no snapshot of the newest generation can be restored, which may have trained long
    and written checkpoints, or if a node knows of a newer checkpoint. A generation that goes back
    on purpose looks for none. If the generation before had to look too, and did not come to protect
    a step, its own origin says nothing.
    """
    old = view.generation
    if old is None or restore is None or _limits(view):
        return ()
    durable = max((inventory.durable for inventory in _usable_inventories(view)), default=-1)
    if restore.world.generation == old.number and durable <= restore.step:
        return ()
    return old.before if restore.world.generation < old.number and old.before else old.timeline


@ahead()
@by_nodes()
def _going_back(nodes: Iterable[NodeRecord]) -> dict[str, bool]:
    """Return the nodes with a worker that requests an older step."""
    return {
        node.node: True
        for node in nodes
        for worker in node.workers
        if RESTORE_AT_MOST in worker.info
    }


def on_timeline(generation: int, *, step: int, timeline: Sequence[Origin]) -> bool:
    """Return whether a snapshot is in the past of the newest generation.

    It is, unless a later generation continued from an earlier step: then the work after that step
    was repeated, and the snapshot belongs to an abandoned timeline.
    """
    return all(step <= origin.step for origin in timeline if origin.generation > generation)


def extend_timeline(timeline: Sequence[Origin], newest: Origin) -> tuple[Origin, ...]:
    """Append an origin, dropping those it makes redundant; bounded by `MAX_TIMELINE`.

    An origin is redundant if a later one continued from the same or an earlier step. If the bound
    removes an origin, its successor invalidates everything before itself instead.
    """
    kept = [origin for origin in timeline if origin.step < newest.step]
    kept.append(newest)
    if len(kept) > MAX_TIMELINE:
        kept = kept[-MAX_TIMELINE:]
        kept[0] = Origin(generation=kept[0].generation, step=-1)
    return tuple(kept)


def _reason(view: JobView, *, members: Sequence[Member], spec: JobSpec) -> str:
    known = member_incarnations(view)
    kept = [m for m in members if m.incarnation in known]
    new = [m for m in members if m.incarnation not in known]
    wanted = max(view.wanted.get("trainer", 0), len(members))
    wanted = wanted if spec.most is None else min(spec.most, wanted)
    who = _listing(kept, "kept", lambda m: f"{m.node}/{m.seat} kept")
    who += _listing(new, "new", lambda m: f"{m.node}/{m.seat} new")
    return f"generation {view.number + 1}: {len(members)} of {wanted} trainers ({', '.join(who)})"


@once
def changed_nodes(view: JobView) -> dict[str, str]:
    """Return the live nodes of the newest generation's group that changed, and the change."""
    known = view.generation.nodes if view.generation else {}
    clauses = {}
    for name, node in unmatched_nodes(view).items():
        if name in known and not node.sidecar:
            clauses[name] = f"the sidecar of node {name} is down"
        elif name in known:
            clauses[name] = f"node {name} was started again (its agent or sidecar ended)"
    return clauses


@once
def changes(view: JobView) -> list[str]:
    """Return the changes of the newest generation's nodes, as clauses."""
    causes = {
        **changed_nodes(view),
        **{name: f"node {name} was lost" for name in lost_nodes(view)},
    }
    if not causes or view.generation is None:
        return []
    return [causes[name] for name in view.generation.nodes if name in causes]


def _listing(things: Sequence[_T], word: str, name: Callable[[_T], str]) -> list[str]:
    if len(things) > _NAMED_RANKS:
        return [f"{len(things)} {word}"]
    return [name(thing) for thing in things]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _NAMED_RANKS else f"{len(names)} nodes"


def _restore_reason(
    restore: RestorePoint | None, *, members: Sequence[Member], holdings: BlockHoldings | None
) -> str:
    if restore is None:
        return ""
    in_arenas = [source for source in restore.sources if not source.rebuilt]
    rebuilt = [source for source in restore.sources if source.rebuilt]
    parts = _listing(
        in_arenas, "from arenas", lambda s: f"rank {s.rank} from node {s.node}'s arena"
    )
    parts += _listing(
        rebuilt,
        "rebuilt from parity",
        lambda s: f"rank {s.rank} rebuilt on {s.node} from parity",
    )
    saved = restore.world
    if lost := lost_places(restore):
        which = ", ".join(map(str, lost))
        parts.append(f"the stages of place {which} of the pipeline from their neighbours")
    text = f"restores step {restore.step} of generation {saved.generation}: {', '.join(parts)}"
    about = ""
    if len(saved.rank_nodes) != len(members):
        text = f"{text}, resharded from {len(saved.rank_nodes)} ranks to {len(members)}"
        about = "about "
    if holdings is None:
        return text
    places = [(member.rank, member.node) for member in members]
    moved = f"{about}{holdings.moved_in_all(places)} of {holdings.total_bytes} bytes move"
    if filled := holdings.filled_in_all(places):
        moved = f"{moved}, and about {filled} more so that every replica has what is replicated"
    return f"{text}, {moved}"
