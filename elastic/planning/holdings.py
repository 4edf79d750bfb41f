"""The bytes of a restore point on each node, and the ranks of a new mesh that need them. Pure.

A mesh divides the state in three ways: pipeline stages, tensor-parallel parts and data-parallel
shards. So a rank's part is modelled as a box in a cube of the state, and a node's holdings as the
boxes of the saved ranks whose blocks it has. The overlap of both needs no transfer. Between equal
meshes this is exact to the byte; between others it is an estimate, as good as the state is evenly
divided. The ranks themselves plan the actual copies, from the real layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.ckpt.memory.records import RestorePoint
from holdfast.elastic.membership.records import MeshSize, NodeRecord
from holdfast.elastic.planning.assign import Edges
from holdfast.elastic.planning.meshes import Coordinates, coordinates, rank_of

_Range: TypeAlias = list[tuple[int, float]]
"""Indices along an axis of the new mesh, each with the part of the whole axis that overlaps."""


class BlockHoldings:
    """The blocks of a restore point in the nodes' memory, relative to the ranks of ``mesh``."""

    def __init__(
        self,
        point: RestorePoint,
        *,
        nodes: Mapping[str, NodeRecord],
        saved: MeshSize,
        mesh: MeshSize,
        replicated_bytes: int = 0,
    ) -> None:
        """``replicated_bytes`` of the state of each saved rank are the same at all replicas."""
        self._replicated_bytes = replicated_bytes
        self._saved, self._mesh = saved, mesh
        self._sizes, self._first, self._several = _blocks(point, nodes)
        self._same = saved == mesh
        self.total_bytes = sum(self._sizes.values())
        self._even_bytes = round(self.total_bytes / mesh.ranks)
        self._found: dict[str, dict[int, int]] = {}

    @property
    def known(self) -> bool:
        """True if the inventories give the lengths of the blocks."""
        return bool(self._sizes)

    def of(self, node: str) -> Mapping[int, int]:
        """Return, by rank of the new mesh, the number of its bytes that the node holds."""
        if (found := self._found.get(node)) is None:
            found = self._found[node] = self._seen(self._ranks_of(node))
        return found

    def _ranks_of(self, node: str) -> Collection[int]:
        """Return the saved ranks whose blocks a node has."""
        if several := self._several.get(node):
            return several
        return (self._first[node],) if node in self._first else ()

    def _seen(self, owned: Collection[int]) -> dict[int, int]:
        if self._same:
            return {rank: self._sizes[rank] for rank in owned} if owned else {}
        saved, mesh, total = self._saved, self._mesh, self.total_bytes
        if len(owned) == saved.cell == mesh.cell == 1:
            (rank,) = owned
            parts = _overlaps_along(rank, saved.dp, mesh.dp)
            return {new: round(part * total) for new, part in parts}
        overlaps: dict[int, float] = defaultdict(float)
        for rank in owned:
            for new, part in self._overlaps(coordinates(rank, saved)):
                overlaps[new] += part
        return {rank: round(part * total) for rank, part in overlaps.items()}

    def _overlaps(self, at: Coordinates) -> Iterator[tuple[int, float]]:
        saved, mesh = self._saved, self._mesh
        if saved.cell == mesh.cell == 1:
            yield from _overlaps_along(at.dp, saved.dp, mesh.dp)
            return
        stages = _overlaps_along(at.pp, saved.pp, mesh.pp)
        parts = _overlaps_along(at.tp, saved.tp, mesh.tp)
        for dp, of_dp in _overlaps_along(at.dp, saved.dp, mesh.dp):
            for pp, of_pp in stages:
                for tp, of_tp in parts:
                    yield rank_of(Coordinates(dp, pp, tp), mesh), of_dp * of_pp * of_tp

    def edges(self, nodes: Sequence[str]) -> Edges | None:
        """Return the results of `of` for many nodes as arrays; None if the case is not simple.

        It is simple if the old and the new mesh divide the state along one axis, and no node holds
        blocks of two ranks.
        """
        if (ranks := self._single(nodes)) is None:
            return None
        before, after = self._saved.dp, self._mesh.dp
        takers = np.flatnonzero(ranks >= 0)
        own = ranks[takers]
        first, behind = own * after // before, -(-(own + 1) * after // before)
        counts = behind - first
        ends = np.cumsum(counts)
        steps = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        places = np.repeat(first, counts) + steps
        gains = self._overlap(np.repeat(own, counts), places)
        return Edges(np.repeat(takers, counts), places, gains)

    def _single(self, nodes: Sequence[str]) -> npt.NDArray[np.int64] | None:
        """Return the one rank whose block each of the nodes holds, -1 for none."""
        if self._same or self._several or not self._saved.cell == self._mesh.cell == 1:
            return None
        first = self._first
        return np.array([first.get(node, -1) for node in nodes], dtype=np.int64)

    def _overlap(
        self, saved: npt.NDArray[np.int64], new: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the number of bytes that the shards of saved and of new ranks share."""
        before, after = self._saved.dp, self._mesh.dp
        start = np.maximum(saved * after, new * before)
        end = np.minimum((saved + 1) * after, (new + 1) * before)
        part = np.maximum(end - start, 0) / (before * after)
        found: npt.NDArray[np.int64] = np.rint(part * self.total_bytes).astype(np.int64)
        return found

    def moved_in_all(self, places: Iterable[tuple[int, str]]) -> int:
        """Return the number of bytes that these ranks need and their nodes do not hold."""
        places = list(places)
        if (single := self._single([node for _, node in places])) is None:
            return sum([self.moved(rank, node=node) for rank, node in places])
        ranks = np.array([rank for rank, _ in places], dtype=np.int64)
        there = np.where(single >= 0, self._overlap(single, ranks), 0)
        return int(np.maximum(self._even_bytes - there, 0).sum())

    def filled_in_all(self, places: Iterable[tuple[int, str]]) -> int:
        """Return the number of bytes that these ranks need and `moved_in_all` does not count.

        Replicated state is stored in the blocks once; each replica holds a part. `moved_in_all`
        counts one part for a rank; this function counts all other parts that are not in its node's
        memory.
        """
        if not self._replicated_bytes:
            return 0
        return sum([self._filled(rank, node) for rank, node in places])

    def _filled(self, rank: int, node: str) -> int:
        replicas = self._mesh.dp // self._mesh.shard
        unit = self._mesh.shard * self._mesh.cell  # ranks this far apart are replicas of each other
        alike = [other for other in self._ranks_of(node) if other % unit == rank % unit]
        others = len(alike) - (rank in alike if self._same else bool(alike))
        before = self._saved.dp // self._saved.shard
        there = self._replicated_bytes * others // before
        return max(self._replicated_bytes * (replicas - 1) // replicas - there, 0)

    def moved(self, rank: int, *, node: str) -> int:
        """Return the number of bytes that a rank needs and its own node's memory does not hold."""
        if self._same:
            return 0 if rank in self._ranks_of(node) else self._sizes[rank]
        return max(self._even_bytes - self.of(node).get(rank, 0), 0)


def saved_mesh(point: RestorePoint, *, known: Mapping[int, MeshSize]) -> MeshSize:
    """Return the mesh that saved a restore point; a purely data-parallel one if not known."""
    ranks = len(point.world.rank_nodes)
    mesh = known.get(point.world.generation)
    return mesh if mesh is not None and mesh.ranks == ranks else MeshSize(dp=ranks)


def _overlaps_along(index: int, before: int, after: int) -> _Range:
    """Return the parts of an axis cut into ``after`` that part ``index`` of ``before`` overlaps."""
    start, end, whole = index * after, (index + 1) * after, before * after
    found = []
    for new in range(start // before, -(-end // before)):
        low, high = new * before, (new + 1) * before
        low, high = (start if start > low else low), (end if end < high else high)
        found.append((new, (high - low) / whole))
    return found


def _blocks(
    point: RestorePoint, nodes: Mapping[str, NodeRecord]
) -> tuple[dict[int, int], dict[str, int], dict[str, set[int]]]:
    """Return the size of every rank's block, if all are known, and the nodes' ranks.

    The second value is the first rank of every node with blocks; the third, all ranks of nodes with
    several.
    """
    generation, step = point.world.generation, point.step
    sizes: dict[int, int] = {}
    firsts: dict[str, int] = {}
    several: dict[str, set[int]] = {}
    for name, node in nodes.items():
        if (inventory := node.inventory) is not None:
            for entry in inventory.blocks:
                if entry.step == step and entry.generation == generation:
                    rank = entry.rank
                    sizes[rank] = entry.payload_bytes
                    if (first := firsts.setdefault(name, rank)) != rank:
                        several.setdefault(name, {first}).add(rank)
    ranks = len(point.world.rank_nodes)
    for name in chain(_neighbours(point, sizes), nodes):
        if len(sizes) >= ranks:
            break
        published = nodes[name].inventory if name in nodes else None
        for entry in published.sealed if published else ():
            if entry.step == step and entry.generation == generation:
                sizes[entry.rank] = entry.payload_bytes
    return (sizes, firsts, several) if len(sizes) == ranks else ({}, {}, {})


def _neighbours(point: RestorePoint, sizes: Mapping[int, int]) -> Iterator[str]:
    """Yield the nodes that probably know the lengths of the lost blocks.

    The nodes of a parity group exchange the lengths, and only they publish them
    (`inventories.compact`).
    """
    homes = {node for rank, node in enumerate(point.world.rank_nodes) if rank not in sizes}
    for group in point.world.parity_groups() if homes else ():
        if not homes.isdisjoint(group):
            yield from group
