"""The tree of a large world: which ranks meet in one circle, and who leads it. Pure.

A *circle* is a small group of ranks, of which the first leads. The ranks of a node are a circle,
their leaders meet in circles of nodes, the leaders of those again, up to one circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Circle: TypeAlias = tuple[int, ...]
"""Ranks that meet, the leader first."""

Ring: TypeAlias = tuple[Circle, ...]
"""The circles at one distance from the leaves; each rank is in one of them at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldScale:
    """The limits of groups in which all ranks connect with all.

    A world of more than ``many`` ranks forms as a tree of circles of at most ``fan_out`` ranks, and
    in its larger groups only ranks connect that talk. Smaller worlds connect all with all.
    """

    many: int = 64
    fan_out: int = 32

    def __post_init__(self) -> None:
        if self.many < 1:
            raise ValueError(f"many is {self.many}, at least 1 is needed")
        if self.fan_out < 2:
            raise ValueError(f"fan_out is {self.fan_out}, at least 2 are needed")


def rings_of(nodes: Sequence[str], *, fan_out: int) -> tuple[Ring, ...]:
    """Return the circles of the ranks at ``nodes``, from the leaves to the one that leads all.

    Member ``i`` is at ``nodes[i]``; member 0 leads all. A node with more than ``fan_out`` ranks has
    several circles.
    """
    of_node: dict[str, list[int]] = {}
    for member, node in enumerate(nodes):
        of_node.setdefault(node, []).append(member)
    ring = tuple(circle for here in of_node.values() for circle in _split(here, fan_out))
    rings = [ring]
    while len(ring) > 1:
        ring = tuple(_split([circle[0] for circle in ring], fan_out))
        rings.append(ring)
    return tuple(rings)


def path_of(member: int, rings: Sequence[Ring]) -> dict[int, Circle]:
    """Return the circles of two and more in which a member meets others, by their rings' numbers.

    They are in order from the leaves on. It leads all of them but the last, and the last one too if
    it leads all.
    """
    path: dict[int, Circle] = {}
    for number, ring in enumerate(rings):
        mine = next((circle for circle in ring if member in circle), None)
        if mine is None:
            break
        if len(mine) > 1:
            path[number] = mine
    return path


def _split(members: Sequence[int], most: int) -> list[Circle]:
    """Divide into the fewest parts of at most ``most``, as equal as can be."""
    parts = -(-len(members) // most)
    size, larger = divmod(len(members), parts)
    ends = [(i + 1) * size + min(i + 1, larger) for i in range(parts)]
    return [tuple(members[end - size - (i < larger) : end]) for i, end in enumerate(ends)]
