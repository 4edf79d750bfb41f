"""The memory that the snapshots of a planned job need, from plain numbers. Pure."""

from __future__ import annotations

from typing import Literal

from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.parity import budget
from holdfast.ckpt.parity.budget import FULL_IN_FLIGHT, MemoryNeed
from holdfast.ckpt.parity.groups import GROUP_SIZE, form_groups


def memory_need(
    rank_bytes: int,
    *,
    nodes: int,
    ranks_per_node: int = 1,
    parity: int | Literal["replicate"] = 1,
    group: int = GROUP_SIZE,
    keep: int = 2,
) -> MemoryNeed:
    """Return the most shared memory that the snapshots of a job need on any of its nodes.

    ``rank_bytes`` is the tracked state of the largest rank, in bytes. The other arguments are those
    of `holdfast run` and of the decorator: the nodes, the ranks on each, the nodes of a group that
    may be lost at once (``"replicate"``: one, by a whole copy), the preferred size of a parity
    group, and the protected steps that stay in memory. The result has the bytes of ``slots``, of
    ``parity`` and of both (``total``).

    Raises ``ValueError`` for numbers that no job can have.
    """
    numbers = {"rank_bytes": rank_bytes, "nodes": nodes, "ranks_per_node": ranks_per_node}
    for name, found in numbers.items():
        if found < 1:
            raise ValueError(f"{name} is {found}, needed: at least 1")
    columns, rows = (1, 1) if parity == "replicate" else (0, int(parity))
    names = [f"node{number:06}" for number in range(nodes)]
    groups, _ = form_groups(dict.fromkeys(names, ""), parity=rows, size=group, columns=columns)
    world = SnapshotWorld(
        run="",
        generation=1,
        peers=tuple(SidecarPeer(node=name, address="") for name in names),
        rank_nodes=tuple(name for name in names for _ in range(ranks_per_node)),
        parity=rows,
        columns=columns,
        groups=groups,
        keep=keep,
    )
    slots = keep + FULL_IN_FLIGHT
    needs = [
        budget.memory_need(world, {0: rank_bytes}, node=name, slots_per_rank=slots)
        for name in names
    ]
    return max(needs, key=lambda need: need.total)
