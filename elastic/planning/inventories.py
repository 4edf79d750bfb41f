"""Compact form of a sidecar's inventory for a node's record, so that records stay small. Pure.

An inventory contains the group of every generation that it names and the blocks of all ranks. In
the records of ``n`` nodes that would be ``n²`` entries. The groups are already in the generation
record, and only the nodes that can rebuild a lost block need its entry.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.ckpt.memory.records import Inventory, SnapshotWorld
from holdfast.elastic.membership.records import GenerationRecord


def known_worlds(record: GenerationRecord | None) -> dict[int, SnapshotWorld]:
    """Return the groups that a generation record names, by generation."""
    if record is None:
        return {}
    points = [point for point in (record.restore, *record.fallbacks) if point is not None]
    worlds = [*(point.world for point in reversed(points)), record.snapshots]
    return {world.generation: world for world in worlds}


def compact(inventory: Inventory, record: GenerationRecord | None) -> Inventory:
    """Leave out groups that ``record`` has, and blocks of parity groups other than the node's.

    Each surviving member of those groups publishes the same entries; if none survives, nothing can
    be rebuilt.
    """
    known = known_worlds(record)
    wanted: dict[int, set[int]] = {}
    for world in inventory.worlds:
        groups = world.parity_groups()
        group = next((set(each) for each in groups if inventory.node in each), None)
        if group is not None:
            ranks = {rank for rank, node in enumerate(world.rank_nodes) if node in group}
            wanted[world.generation] = ranks
    return msgspec.structs.replace(
        inventory,
        worlds=tuple(each for each in inventory.worlds if known.get(each.generation) != each),
        sealed=tuple(
            entry
            for entry in inventory.sealed
            if entry.generation not in wanted or entry.rank in wanted[entry.generation]
        ),
    )


def whole(inventories: Iterable[Inventory], record: GenerationRecord | None) -> list[Inventory]:
    """Return the inventories with the groups of ``record``, which `compact` left out."""
    found = list(inventories)
    if found and (worlds := known_worlds(record)):
        first = {world.generation: world for world in found[0].worlds}
        both = {**worlds, **first}
        found[0] = msgspec.structs.replace(found[0], worlds=tuple(both.values()))
    return found
