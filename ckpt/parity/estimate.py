"""The memory that the snapshots of a planned job need, from plain numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError
from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.parity import budget
from holdfast.ckpt.parity.budget import FULL_IN_FLIGHT, SMALL_IN_FLIGHT, MemoryNeed
from holdfast.ckpt.parity.groups import GROUP_SIZE, form_groups

_RULES: Final[Mapping[str, checks.Rule]] = {
    "rank_bytes": checks.count(1, remedy="give 1 or more bytes, as a whole number"),
    "nodes": checks.count(1, remedy="give 1 or more nodes"),
    "ranks_per_node": checks.count(1, remedy="give 1 or more ranks"),
    "parity": checks.either(
        "replicate",
        checks.count(0, remedy="give the number of nodes that may be lost, or 'replicate'"),
    ),
    "group": checks.count(2, remedy="give 2 or more nodes"),
    "keep": checks.count(1, remedy="give 1 or more snapshots"),
    "fixed_bytes": checks.count(0, remedy="give 0 or more bytes, as a whole number"),
}


def memory_need(
    rank_bytes: int,
    *,
    nodes: int,
    ranks_per_node: int = 1,
    parity: int | Literal["replicate"] = 1,
    group: int = GROUP_SIZE,
    keep: int = 1,
    fixed_bytes: int = 0,
) -> MemoryNeed:
    """Return the shared memory that the snapshots of a job need on the node that needs most.

    ``rank_bytes`` is the tracked state of the largest rank, in bytes. The other arguments are those
    of `holdfast run` and of the decorator: the nodes, the ranks on each, the nodes of a group that
    may be lost at once (``"replicate"``: one, by a whole copy), the preferred size of a parity
    group, and the protected steps that stay in memory. ``fixed_bytes`` of the rank's state never
    change: they lie in memory once. The result has the bytes of ``slots``, of
    ``parity`` and of both (``total``). ``lent`` is what a node may take beside them, if there is
    room, while snapshots come faster than they are protected.

    Raises ``ArgumentError`` for numbers that no job can have.
    """
    given = {"rank_bytes": rank_bytes, "nodes": nodes, "ranks_per_node": ranks_per_node}
    given |= {"group": group, "keep": keep, "fixed_bytes": fixed_bytes}
    checks.check("memory_need", {**given, "parity": parity}, _RULES, error=ArgumentError)
    if fixed_bytes > rank_bytes:
        raise ArgumentError(
            f"memory_need(fixed_bytes={fixed_bytes}): it is a part of rank_bytes={rank_bytes}; "
            "give as many or fewer"
        )
    columns, rows = (1, 1) if parity == "replicate" else (0, int(parity))
    if nodes < rows + max(columns, 1):
        raise ArgumentError(
            f"memory_need(nodes={nodes}, parity={parity!r}): a group needs more nodes than may be "
            f"lost of it; give {rows + max(columns, 1)} or more nodes, or less parity"
        )
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

    def need(in_flight: int) -> MemoryNeed:
        slots = keep + in_flight
        every = [
            budget.memory_need(
                world,
                {0: rank_bytes},
                node=name,
                slots_per_rank=slots,
                fixed_bytes={0: fixed_bytes},
            )
            for name in names
        ]
        return max(every, key=lambda each: each.total)

    regular = need(SMALL_IN_FLIGHT)
    return replace(regular, lent=need(FULL_IN_FLIGHT).total - regular.total)
