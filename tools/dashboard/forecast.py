"""The forecast of a loss: the planner's own rule, applied to what the other nodes hold. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from holdfast.ckpt.memory.records import BlockEntry, Inventory, ParityEntry, SnapshotWorld
from holdfast.ckpt.parity.stripes import restore_points


class LossForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of losing ``nodes`` now, with their memory.

    ``step`` is the step that memory would give back, None if it would give back none; then the
    job goes on from the newest checkpoint, ``durable``, or begins anew. ``steps_lost`` would be
    executed again. ``rebuilt`` counts the ranks that come from parity, ``ranks_left`` those whose
    nodes stay. ``reason`` is the planner's.
    """

    nodes: tuple[str, ...]
    step: int | None = None
    rebuilt: int = 0
    durable: int | None = None
    steps_lost: int | None = None
    ranks: int = 0
    ranks_left: int = 0
    parity: int = 0
    groups: tuple[tuple[str, ...], ...] = ()
    reason: str = ""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one snapshot that a node holds."""

    blocks: tuple[BlockEntry, ...] = ()
    parities: tuple[ParityEntry, ...] = ()
    sealed: tuple[BlockEntry, ...] = ()


def groups_hit(world: SnapshotWorld, nodes: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Return the parity groups that lose a node."""
    return tuple(group for group in world.parity_groups() if not set(group).isdisjoint(nodes))


def inventories(
    world: SnapshotWorld, held: Mapping[str, Held], nodes: Collection[str]
) -> list[Inventory]:
    """Return what is left of a protected snapshot without ``nodes``.

    ``held`` are the answers of the groups that lose a node. The other groups have what every
    protected snapshot has: the blocks of their own ranks.
    """
    entries = {entry.rank: entry for each in held.values() for entry in each.sealed}
    sealed = tuple(entries[rank] for rank in sorted(entries))
    asked = {node for group in groups_hit(world, nodes) for node in group}
    own: dict[str, list[BlockEntry]] = {}
    for rank, node in enumerate(world.rank_nodes):
        if node not in asked and rank in entries:
            own.setdefault(node, []).append(entries[rank])
    found = []
    for peer in world.peers:
        name = peer.node
        if name in nodes or (name in asked and name not in held):
            continue
        here = held.get(name, Held(blocks=tuple(own.get(name, ()))))
        found.append(
            Inventory(
                node=name,
                worlds=(world,),
                blocks=here.blocks,
                parities=here.parities,
                sealed=sealed,
            )
        )
    return found


def forecast(
    nodes: Sequence[str],
    *,
    world: SnapshotWorld,
    held: Mapping[str, Held],
    step: int,
    durable: int | None,
) -> LossForecast:
    """Return what the loss of ``nodes`` would cost; ``step`` is the newest complete one."""
    points, reason = restore_points(inventories(world, held, nodes))
    left = sum(node not in nodes for node in world.rank_nodes)
    point = points[0] if points else None
    back = point.step if point else durable
    return LossForecast(
        nodes=tuple(nodes),
        step=point.step if point else None,
        rebuilt=sum(source.rebuilt for source in point.sources) if point else 0,
        durable=durable,
        steps_lost=step if back is None else max(step - back, 0),
        ranks=len(world.rank_nodes),
        ranks_left=left,
        parity=world.parity,
        groups=groups_hit(world, nodes),
        reason=reason,
    )
