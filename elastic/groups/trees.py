"""The trees of one rank in a large world: of all ranks, and of those that sum its gradients.

The plans of all ranks go through the same circles as their messages, but apart from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from holdfast.ckpt.snapshot.store_gather import StoreGather
from holdfast.elastic.groups import collectives
from holdfast.elastic.groups.circles import WorldScale, path_of, rings_of
from holdfast.elastic.groups.forming import LargeWorld, WantedGroup
from holdfast.elastic.groups.tree import MessageTree
from holdfast.elastic.groups.tree_plans import CircleGather, TreeGather
from holdfast.elastic.groups.waits import Joined, WaitGuard
from holdfast.elastic.membership.records import GenerationRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The trees of all ranks and of `GenerationWorld.dp` and ``edp``; None where they are few."""

    world: MessageTree | None = None
    dp: MessageTree | None = None
    edp: MessageTree | None = None


NO_TREES: Final = Trees()


def trees_of(
    record: GenerationRecord, rank: int, guard: WaitGuard, *, scale: WorldScale, timeout: timedelta
) -> Trees:
    """Form the trees in which ``rank`` has a place; collective over all ranks.

    ``timeout`` is that of one message. Raises ``GenerationOverError`` if the generation is over.
    """
    size = len(record.members)

    def plant(step: int, join: Callable[[], Joined] | None = None) -> MessageTree | None:
        """Form the tree of this rank and every ``step``-th before and after it."""
        ranks = range(rank % step, size, step)
        if len(ranks) <= scale.many:
            return None
        nodes = [record.members[each].node for each in ranks]
        member = ranks.index(rank)
        path = path_of(member, rings_of(nodes, fan_out=scale.fan_out))
        circles = [
            collectives.form_circle(
                _wanted(f"tree/{step}/{ring}", [ranks[m] for m in circle], rank, timeout)
            )
            for ring, circle in path.items()  # the keys are at the leader's point
        ]
        return MessageTree(circles, member=member, members=len(ranks), join=join)

    cell, ep = record.mesh.cell, record.mesh.ep
    return Trees(
        world=plant(1, lambda: guard.join("tree/own")),
        dp=plant(cell) if cell > 1 else None,
        edp=plant(ep * cell) if ep > 1 else None,
    )


def plans_of(
    record: GenerationRecord, rank: int, guard: WaitGuard, *, large: LargeWorld
) -> TreeGather:
    """Return the gather of plans of a large world's ranks; connects when it is used."""
    nodes = [member.node for member in record.members]
    path: list[CircleGather] = []
    for ring, circle in path_of(rank, rings_of(nodes, fan_out=large.scale.fan_out)).items():
        up, down = (
            StoreGather(
                large.points.kept(circle[0], f"plans/{ring}/{way}"),
                rank=circle.index(rank),
                size=len(circle),
                poll=guard.check,
                ranks=circle,
            )
            for way in ("up", "down")
        )
        path.append(CircleGather(leads=circle[0] == rank, up=up, down=down))
    return TreeGather(path, member=rank, size=len(nodes))


def _wanted(name: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> WantedGroup:
    return WantedGroup(name=name, ranks=ranks, index=ranks.index(rank), timeout=timeout, eager=True)
