"""Assignment of trainers to ranks: whole data-parallel groups, fewest bytes moved. Pure.

The trainers are divided into *cells* of ``tp × pp`` ranks, one for each data-parallel group (or for
each ``shard`` groups if replicas of the state are sharded over that many, or for each ``ep``
groups, which share the experts). A cell lies inside one node if possible, else inside one failure
domain, so that a failure loses whole groups. Then cells get their places, and the trainers of a
cell its ranks, by the bytes of the restore point that their nodes already hold.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TypeAlias

from holdfast.ckpt.parity.domains import domains_of
from holdfast.elastic.membership.records import (
    GenerationRecord,
    Member,
    MeshSize,
    NodeRecord,
    WorkerRecord,
)
from holdfast.elastic.membership.view import seat_order
from holdfast.elastic.planning.assign import EXACT_MOST, assign, assign_edges
from holdfast.elastic.planning.holdings import BlockHoldings

Trainer: TypeAlias = tuple[NodeRecord, WorkerRecord]
Cell: TypeAlias = tuple[Trainer, ...]
_Label: TypeAlias = Callable[[NodeRecord], str]

_KEPT, _HOME = 2, 1
"""Gains of keeping a rank, and of being on the node of its former worker: less than one byte that
need not move, so they decide only between equal bytes."""

_WEIGHT = 4
_NO_SEAT = ("", 0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The trainers by rank, and the numbers of cells within one node, and within one domain."""

    ranks: tuple[Trainer, ...]
    on_nodes: int
    in_domains: int


class Placer:
    """Places the trainers of one new generation; ``old`` is the one before."""

    def __init__(
        self, mesh: MeshSize, *, old: GenerationRecord | None, holdings: BlockHoldings | None
    ) -> None:
        self._holdings = holdings
        self._size = mesh.near
        self._cells = mesh.ranks // mesh.near
        self._members = {member.incarnation: member for member in old.members} if old else {}
        same = old is not None and old.mesh == mesh and len(old.members) == mesh.ranks
        self._homes = {member.rank: member for member in old.members} if old and same else {}
        self._kept = {member.incarnation: rank for rank, member in self._homes.items()}
        self._ranks_at: dict[str, list[int]] = defaultdict(list)
        for rank, member in self._homes.items():
            self._ranks_at[member.node].append(rank)

    def place(self, ready: Sequence[Trainer]) -> Placement:
        """Choose among the ready trainers, at least as many as ranks, and give each its rank."""
        cells = form_cells(self._in_order(ready), size=self._size)
        if self._size > 1:
            cells.sort(key=lambda cell: min(self._standing(trainer)[0] for trainer in cell))
        by_index, rest = self._settled(cells[: self._cells])
        free = [index for index, cell in enumerate(by_index) if cell is None]
        left = []
        for cell, place in zip(rest, self._taken(rest, free), strict=True):
            if place is None:
                left.append(cell)
            else:
                by_index[free[place]] = cell
        fill = iter(left)
        whole = [cell or next(fill) for cell in by_index]
        if self._size == 1:
            return Placement(ranks=tuple([cell[0] for cell in whole]), on_nodes=0, in_domains=0)
        ranks = [each for index, cell in enumerate(whole) for each in self._inside(cell, index)]
        nodes = [len({node.node for node, _ in cell}) == 1 for cell in whole if cell[1:]]
        domains = [len({domain_of(node) for node, _ in cell}) == 1 for cell in whole if cell[1:]]
        return Placement(ranks=tuple(ranks), on_nodes=sum(nodes), in_domains=sum(domains))

    def _taken(self, cells: Sequence[Cell], free: Sequence[int]) -> list[int | None]:
        """Return the number of the free index for each cell; None: any."""
        if self._size == 1 and self._holdings and not self._homes and len(free) > EXACT_MOST:
            edges = self._holdings.edges([node.node for ((node, _),) in cells])
            if edges is not None:
                return assign_edges(edges, takers=len(cells))
        gains = [self._cell_gains(cell) for cell in cells]
        if len(free) < self._cells:
            place_of = {index: place for place, index in enumerate(free)}
            gains = [
                {place_of[i]: gain for i, gain in row.items() if i in place_of} for row in gains
            ]
        return assign(gains, places=len(free))

    def _settled(self, cells: Sequence[Cell]) -> tuple[list[Cell | None], list[Cell]]:
        """Keep the ranks of cells whose nodes hold everything they need; return them and the rest.

        No other trainer could bring more to those ranks, so no assignment is better.
        """
        by_index: list[Cell | None] = [None] * self._cells
        if not self._kept:
            return by_index, list(cells)
        rest = []
        size = self._size
        for cell in cells:
            ranks = [self._kept_rank(trainer) for trainer in cell]
            first = ranks[0] if size == 1 else min(ranks)
            if (
                first < 0
                or first % size
                or (size > 1 and sorted(ranks) != list(range(first, first + size)))
            ):
                rest.append(cell)
            else:
                by_index[first // size] = cell
        return by_index, rest

    def _kept_rank(self, trainer: Trainer) -> int:
        """Return the rank that a trainer keeps because its node holds all its bytes, or -1."""
        node, worker = trainer
        rank = self._kept.get(worker.incarnation, -1)
        if rank >= 0 and self._holdings and self._holdings.moved(rank, node=node.node):
            return -1
        return rank

    def _in_order(self, ready: Sequence[Trainer]) -> list[Trainer]:
        """Return the trainers in the order of `_standing`."""
        members = self._members
        inside, others = [], []
        for trainer in ready:
            if (member := members.get(trainer[1].incarnation)) is None:
                others.append(trainer)
            else:
                inside.append((member.rank, trainer))
        inside.sort(key=itemgetter(0))
        return [trainer for _, trainer in inside] + sorted(others, key=self._standing)

    def _standing(self, trainer: Trainer) -> tuple[int, tuple[str, int, str], str]:
        """Return a sort key: members of the old generation by rank, then the others by seat."""
        _, worker = trainer
        if (member := self._members.get(worker.incarnation)) is not None:
            return member.rank, _NO_SEAT, ""
        return len(self._members), seat_order(worker.seat), worker.incarnation

    def _gains(self, trainer: Trainer) -> dict[int, int]:
        """Return the trainer's gain by rank: bytes on its node, and a bonus for its former rank."""
        node, worker = trainer
        resident = self._holdings.of(node.node) if self._holdings else {}
        gains = {rank: nbytes * _WEIGHT for rank, nbytes in resident.items()}
        for rank in self._ranks_at.get(node.node, ()):
            occupied = self._homes[rank].incarnation == worker.incarnation
            gains[rank] = gains.get(rank, 0) + (_KEPT if occupied else _HOME)
        return gains

    def _cell_gains(self, cell: Cell) -> dict[int, int]:
        """Return, by a cell's place, the largest gain of this cell's trainers at its ranks."""
        if len(cell) == 1:
            return self._gains(cell[0])
        best: dict[int, int] = {}
        for trainer in cell:
            for rank, gain in self._gains(trainer).items():
                best[rank] = max(best.get(rank, 0), gain)
        total: Counter[int] = Counter()
        for rank, gain in best.items():
            total[rank // self._size] += gain
        return dict(total)

    def _inside(self, cell: Cell, index: int) -> Iterable[Trainer]:
        """Return the trainers of the cell at place ``index``, in rank order."""
        if len(cell) == 1:
            return cell
        first = index * self._size
        ranks = range(first, first + len(cell))
        gains = [
            {rank - first: gain for rank, gain in self._gains(each).items() if rank in ranks}
            for each in cell
        ]
        placed: list[Trainer | None] = [None] * len(cell)
        rest = []
        for trainer, at in zip(cell, assign(gains, places=len(cell)), strict=True):
            if at is None:
                rest.append(trainer)
            else:
                placed[at] = trainer
        fill = iter(rest)
        return [trainer or next(fill) for trainer in placed]


def domain_of(node: NodeRecord, *, above: int = 0) -> str:
    """Return a node's failure domain, or the one so many levels ``above``, up to the widest.

    Without a label, the node is its own domain.
    """
    path = domains_of(node.domain) or (f"\0{node.node}",)
    return path[max(len(path) - 1 - above, 0)]


def form_cells(trainers: Sequence[Trainer], *, size: int) -> list[Cell]:
    """Divide trainers, in their order, into as many cells of ``size`` as possible.

    First cells inside one node, then, from the rest, inside one failure domain, then inside wider
    ones, then across domains. Earlier trainers stay together.
    """
    if size == 1:
        return [(trainer,) for trainer in trainers]
    cells: list[Cell] = []
    left = _cut(_grouped(trainers, lambda node: node.node), size, cells)
    depth = max((len(domains_of(node.domain)) for node, _ in left), default=0)
    for above in range(max(depth, 1)):
        left = _cut(_grouped(left, partial(domain_of, above=above)), size, cells)
    _cut({"": left}, size, cells)
    return cells


def _grouped(trainers: Sequence[Trainer], label: _Label) -> Mapping[str, Sequence[Trainer]]:
    groups: dict[str, list[Trainer]] = defaultdict(list)
    for trainer in trainers:
        groups[label(trainer[0])].append(trainer)
    return groups


def _cut(groups: Mapping[str, Sequence[Trainer]], size: int, cells: list[Cell]) -> list[Trainer]:
    """Append the whole cells of each group; return the remaining trainers, largest rests first."""
    rests = []
    for group in groups.values():
        whole = len(group) - len(group) % size
        cells += [tuple(group[at : at + size]) for at in range(0, whole, size)]
        rests.append(group[whole:])
    return [trainer for rest in sorted(rests, key=len, reverse=True) for trainer in rest]


def members_of(ranks: Sequence[Trainer]) -> tuple[Member, ...]:
    """Return the members of a generation with these trainers as its ranks."""
    return tuple(
        Member(
            rank=rank,
            seat=worker.seat,
            node=node.node,
            incarnation=worker.incarnation,
            info=worker.info,
        )
        for rank, (node, worker) in enumerate(ranks)
    )
