"""The placement of parity, and the snapshots that can be restored after a loss. Pure.

The nodes of a parity group guard each other with ``m`` parity rows per stripe over ``k`` data
columns, ``k + m`` at most the size of the group. The *node block* of a node is its ranks' blocks in
rank order. Each has its length rounded up to 4 KiB, so that offsets stay the same while the length
of an index varies a little. The node block is cut into ``k`` *pieces* of equal length. In a group
of ``n`` the stripe ``s`` keeps its parity rows on nodes ``s … s+m-1`` and takes one piece from each
of the next ``k`` nodes (all modulo ``n``). So every node has at most one fragment of each of the
``n`` stripes, and the loss of any ``m`` nodes loses at most ``m`` fragments of each.
``k = n - m`` costs the least memory; with ``k = 1`` every row is a copy of a node block. Stripes
and nodes are numbered through all groups, one group after the other. Bytes behind the end of a node
block are zeros, which are never sent.

The fixed parts of blocks (see `BlockEntry`) are a node block of their own, with their own pieces.
Every column and row begins with them. So the first `Geometry.fixed_row_bytes` of a row are the same
for all steps that name the same fixed parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heapreplace

from holdfast.ckpt.memory.block import align, block_bytes
from holdfast.ckpt.memory.records import (
    BlockEntry,
    BlockSource,
    Inventory,
    ParityEntry,
    RestorePoint,
    SnapshotWorld,
)

ALIGN_BYTES = 64
ROOM_BYTES = 4096
"""The space of a rank's block inside its node block is a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes ``at … at+nbytes`` of a rank's block, which go to offset ``into`` of a buffer."""

    rank: int
    at: int
    nbytes: int
    into: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """One group: nodes ``start … start+size-1``, ``k`` columns.

    ``pieces`` are the lengths of a piece of the fixed and of the moving part.
    """

    start: int
    size: int
    k: int
    pieces: tuple[int, int]

    def at(self, number: int) -> int:
        """Return the node or stripe ``number`` steps behind the group's first one."""
        return self.start + number % self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockShare:
    """Bytes from ``block_at`` on of a rank's block, which lie at ``at`` in a part of its node's."""

    rank: int
    at: int
    nbytes: int
    block_at: int


class _NodeBlocks:
    """The fixed or the moving parts of all ranks' blocks, those of each node one behind another."""

    def __init__(self, nodes: int) -> None:
        self.totals = [0] * nodes
        self.places: dict[int, list[_BlockShare]] = {}

    def add(self, node: int, rank: int, *, block_at: int, nbytes: int) -> None:
        """Put bytes of a rank's block behind those that the node has already."""
        if nbytes:
            place = _BlockShare(rank=rank, at=self.totals[node], nbytes=nbytes, block_at=block_at)
            self.places.setdefault(node, []).append(place)
            self.totals[node] += align(nbytes, ROOM_BYTES)

    def spans(self, node: int, first: int, last: int, *, into: int) -> Iterator[Span]:
        """Yield what fills bytes ``first … last`` of a node's part; they go to ``into``."""
        for place in self.places.get(node, ()):
            lo, hi = max(place.at, first), min(place.at + place.nbytes, last)
            if lo < hi:
                at = place.block_at + lo - place.at
                yield Span(rank=place.rank, at=at, nbytes=hi - lo, into=into + lo - first)


class Geometry:
    """The stripes of one snapshot, from the groups of the nodes and the length of every block.

    ``nodes`` lists the nodes group after group; ``n`` is their number, which is also the number of
    stripes; ``m`` is the number of parity rows of a stripe, ``rows`` that of all stripes. With
    ``near``, only the groups of those nodes are laid out, and only they may be queried.
    """

    def __init__(
        self,
        world: SnapshotWorld,
        entries: Mapping[int, BlockEntry],
        *,
        near: Set[str] | None = None,
    ) -> None:
        if entries.keys() != set(range(len(world.rank_nodes))):
            raise ValueError(f"entries of ranks {sorted(entries)}, world has {world.rank_nodes}")
        groups = world.parity_groups()
        self.nodes = tuple(name for group in groups for name in group)
        self.n, self.m = len(self.nodes), world.parity
        self.rows = self.n * self.m
        self._numbers = {name: number for number, name in enumerate(self.nodes)}
        self._rank_nodes, self._entries = world.rank_nodes, entries
        self._parts = _NodeBlocks(self.n), _NodeBlocks(self.n)
        self._rings: dict[int, _Ring] = {}
        members = None if near is None else {x for g in groups if not near.isdisjoint(g) for x in g}
        for rank, name in enumerate(world.rank_nodes):
            if members is not None and name not in members:
                continue
            node, entry = self._numbers[name], entries[rank]
            fixed = entry.fixed_bytes
            self._parts[0].add(node, rank, block_at=0, nbytes=fixed)
            self._parts[1].add(
                node, rank, block_at=fixed, nbytes=max(block_bytes(entry) - fixed, 0)
            )
        start = 0
        for group in groups:
            if members is None or group[0] in members:
                self._add_ring(start, len(group), world.columns or len(group) - self.m)
            start += len(group)

    def _add_ring(self, start: int, size: int, k: int) -> None:
        fixed, moving = (max(part.totals[start : start + size], default=0) for part in self._parts)
        pieces = (
            align(-(-fixed // k), ROOM_BYTES) if k else 0,
            align(-(-moving // k), ALIGN_BYTES) if k else 0,
        )
        ring = _Ring(start=start, size=size, k=k, pieces=pieces)
        self._rings |= dict.fromkeys(range(start, start + size), ring)

    def columns(self, stripe: int) -> int:
        """Return the number ``k`` of data columns of ``stripe``."""
        return self._rings[stripe].k

    def piece_bytes(self, stripe: int) -> int:
        """Return the length of a piece in the group of ``stripe``."""
        return sum(self._rings[stripe].pieces)

    def fixed_row_bytes(self, stripe: int) -> int:
        """Return the length of the fixed part of a row of ``stripe``: whole pages."""
        return self._rings[stripe].pieces[0]

    def fixed_parts(self, stripe: int) -> tuple[tuple[int, int, int], ...]:
        """Return (rank, number, bytes) of the fixed parts in the group of ``stripe``."""
        ring = self._rings[stripe]
        nodes = range(ring.start, ring.start + ring.size)
        return tuple(
            (place.rank, self._entries[place.rank].fixed, place.nbytes)
            for node in nodes
            for place in self._parts[0].places.get(node, ())
        )

    def group_of(self, stripe: int) -> tuple[str, ...]:
        """Return the nodes of the group of ``stripe`` (or of the node with that number)."""
        ring = self._rings[stripe]
        return self.nodes[ring.start : ring.start + ring.size]

    def node_of(self, stripe: int, number: int) -> int:
        """Return the node of fragment ``number``: data columns first, then parity rows."""
        ring = self._rings[stripe]
        step = self.m + number if number < ring.k else number - ring.k
        return ring.at(stripe - ring.start + step)

    def piece_of(self, stripe: int, column: int) -> int:
        """Return the number of the node block's piece that is this column of ``stripe``."""
        return self._rings[stripe].k - 1 - column

    def filled_bytes(self, stripe: int, column: int) -> int:
        """Return the number of a data column's bytes before the zeros behind its node block."""
        node, piece = self.node_of(stripe, column), self.piece_of(stripe, column)
        fixed, moving = (
            min(max(part.totals[node] - piece * nbytes, 0), nbytes)
            for part, nbytes in zip(self._parts, self._rings[stripe].pieces, strict=True)
        )
        return self.fixed_row_bytes(stripe) + moving if moving else fixed

    def row_bytes(self, stripe: int) -> int:
        """Return the length of the parity rows of ``stripe``; bytes behind it would be zeros."""
        columns = range(self.columns(stripe))
        return max((self.filled_bytes(stripe, column) for column in columns), default=0)

    def rows_of(self, node: str) -> tuple[tuple[int, int], ...]:
        """Return the (stripe, row) pairs ``node`` holds."""
        number = self._numbers[node]
        ring = self._rings[number]
        return tuple((ring.at(number - ring.start - row), row) for row in range(self.m))

    def _fragment(self, node: int, piece: int) -> tuple[int, int]:
        """Return the (stripe, column) that a piece of a node block is."""
        ring = self._rings[node]
        column = ring.k - 1 - piece
        return ring.at(node - ring.start - self.m - column), column

    def spans(self, stripe: int, column: int, lo: int, hi: int) -> tuple[Span, ...]:
        """Return the spans that fill bytes ``lo … hi`` of a data column; the gaps are zeros."""
        node, piece = self.node_of(stripe, column), self.piece_of(stripe, column)
        found: list[Span] = []
        base = 0
        for part, nbytes in zip(self._parts, self._rings[stripe].pieces, strict=True):
            first, last = max(lo, base), min(hi, base + nbytes)
            if first < last:
                shift = piece * nbytes - base
                found += part.spans(node, first + shift, last + shift, into=first - lo)
            base += nbytes
        return tuple(found)

    def spans_from(self, stripe: int, column: int, start: int) -> tuple[Span, ...]:
        """Return the spans that fill a data column behind ``start``: 0 or `fixed_row_bytes`."""
        every = self.spans(stripe, column, 0, self.filled_bytes(stripe, column))
        return tuple(span for span in every if span.into >= start)

    def pieces_of_block(self, rank: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (stripe, column, lo, hi, at) for every part of a rank's block, in order.

        Bytes ``lo … hi`` of that column are the bytes from ``at`` on of the block.
        """
        node, base = self._numbers[self._rank_nodes[rank]], 0
        for part, nbytes in zip(self._parts, self._rings[node].pieces, strict=True):
            for place in part.places.get(node, ()):
                if place.rank == rank:
                    yield from self._pieces_of(node, place, nbytes, base)
            base += nbytes

    def _pieces_of(
        self, node: int, place: _BlockShare, nbytes: int, base: int
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield the pieces of ``nbytes`` that a place touches, each at ``base`` of a column."""
        start, end = place.at, place.at + place.nbytes
        for piece in range(start // nbytes, -(-end // nbytes)):
            first = piece * nbytes
            lo, hi = max(start - first, 0), min(end - first, nbytes)
            stripe, column = self._fragment(node, piece)
            yield stripe, column, base + lo, base + hi, place.block_at + first + lo - start


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRead:
    """The sources of a surviving data column: each span with the node that has it."""

    column: int
    spans: tuple[tuple[Span, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRead:
    """The node that holds a parity row."""

    row: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecovery:
    """One part of a lost block: bytes ``lo … hi`` of ``column``, decoded from ``k`` fragments."""

    stripe: int
    column: int
    lo: int
    hi: int
    at: int
    columns: tuple[ColumnRead, ...]
    rows: tuple[RowRead, ...]


def plan_recovery(
    geometry: Geometry,
    rank: int,
    *,
    holders: Mapping[int, str],
    rows: Mapping[tuple[int, int], str],
) -> tuple[tuple[BlockRecovery, ...] | None, str]:
    """Plan the rebuild of a rank's block from the remaining fragments, or say why it is impossible.

    ``holders`` maps ranks to a node that has their block, ``rows`` maps (stripe, row) to the node
    that has that parity row.
    """
    plan = []
    for stripe, column, lo, hi, at in geometry.pieces_of_block(rank):
        columns = []
        k = geometry.columns(stripe)
        for other in range(k):
            spans = geometry.spans(stripe, other, lo, hi)
            if other != column and all(span.rank in holders for span in spans):
                placed = tuple((span, holders[span.rank]) for span in spans)
                columns.append(ColumnRead(column=other, spans=placed))
        columns.sort(key=lambda read: len(read.spans))  # zeros need no read
        needed = k - len(columns)
        kept = [
            RowRead(row=row, node=rows[stripe, row])
            for row in range(geometry.m)
            if (stripe, row) in rows
        ]
        if len(kept) < needed:
            known = {read.column for read in columns} | {k + row.row for row in kept}
            return None, _too_few(geometry, stripe, known)
        plan.append(
            BlockRecovery(
                stripe=stripe,
                column=column,
                lo=lo,
                hi=hi,
                at=at,
                columns=tuple(columns),
                rows=tuple(kept[:needed]),
            )
        )
    return tuple(plan), "every stripe has enough fragments"


def _too_few(geometry: Geometry, stripe: int, known: set[int]) -> str:
    k = geometry.columns(stripe)
    lost = [number for number in range(k + geometry.m) if number not in known]
    nodes = ", ".join(sorted({geometry.nodes[geometry.node_of(stripe, each)] for each in lost}))
    return (
        f"stripe {stripe} has {len(known)} of the {k} fragments it needs: those of nodes {nodes} "
        "are missing"
    )


class _Remains:
    """The contents of all inventories for one (generation, step), added in the order of nodes.

    ``holders`` has the first node that has a rank's block, ``others`` the nodes after it.
    """

    __slots__ = ("conflict", "entries", "holders", "others", "spoiled", "step", "world")

    def __init__(self, world: SnapshotWorld, step: int) -> None:
        self.world, self.step = world, step
        self.entries: dict[int, BlockEntry] = {}
        self.holders: dict[int, str] = {}
        self.others: dict[int, list[str]] = {}
        self.spoiled: set[int] = set()
        self.conflict = ""

    def add(self, entry: BlockEntry) -> None:
        """Add the entry of a block, from any inventory."""
        known = self.entries.setdefault(entry.rank, entry)
        if known is not entry and known != entry:
            self.conflict = f"rank {entry.rank} was sealed twice, as {known} and {entry}"

    def holder_of(self, rank: int) -> str | None:
        """Return the node to serve a rank's block: its home if possible; None if it is lost."""
        first, home = self.holders.get(rank), self.world.rank_nodes[rank]
        return home if first != home and home in self.others.get(rank, ()) else first


def restore_points(inventories: Sequence[Inventory]) -> tuple[list[RestorePoint], str]:
    """Return every restorable snapshot, newest first, with the reason for the choice.

    A snapshot is restorable when each rank's block is held by a live sidecar (one with an
    inventory) or can be rebuilt from parity. Newer generations come first: their snapshots
    supersede those of older generations.
    """
    in_order = sorted(inventories, key=lambda each: each.node)
    remains = _collect(in_order)
    live = [inventory.node for inventory in in_order]
    points: list[RestorePoint] = []
    reasons: list[str] = []
    for key in sorted(remains, reverse=True):
        sources, reason = _sources(remains[key], in_order, live)
        words = f"step {key[1]} of generation {key[0]}"
        if sources is None:
            reasons.append(f"{words} cannot be restored: {reason}")
            continue
        if not points:
            reasons.append(f"{words}: {reason}")
        points.append(RestorePoint(world=remains[key].world, step=key[1], sources=sources))
    return points, "; ".join(reasons) or f"no snapshot in the memory of nodes {live or 'none'}"


def remnants(inventories: Sequence[Inventory]) -> Iterator[RestorePoint]:
    """Yield every snapshot with those of its blocks that can be read, newest first.

    Unlike `restore_points`, this names incomplete ones too: the others of a point's ranks are lost.
    """
    in_order = sorted(inventories, key=lambda each: each.node)
    remains = _collect(in_order)
    for key in sorted(remains, reverse=True):
        found = remains[key]
        yield RestorePoint(
            world=found.world, step=key[1], sources=tuple(_readable(found, in_order))
        )


def _readable(remains: _Remains, in_order: Sequence[Inventory]) -> Iterator[BlockSource]:
    """Yield the sources of all ranks' blocks that are held, or can be rebuilt from parity."""
    ranks = range(len(remains.world.rank_nodes))
    if remains.conflict:
        return
    known = all(rank in remains.entries for rank in ranks)
    for rank in ranks:
        if (node := remains.holder_of(rank)) is not None:
            yield BlockSource(rank=rank, node=node)
        elif known and not _unrecoverable(remains, [rank], in_order):
            node = in_order[rank % len(in_order)].node
            yield BlockSource(rank=rank, node=node, rebuilt=True)


def _collect(in_order: Sequence[Inventory]) -> dict[tuple[int, int], _Remains]:
    """Return the contents of all inventories by snapshot, without the parity rows.

    All nodes of a parity group repeat the same ``sealed``. An identical repetition is skipped,
    unless two entries contradict each other.
    """
    remains = _gather(in_order, repeats=False)
    if any(each.conflict for each in remains.values()):
        return _gather(in_order, repeats=True)
    return remains


def _gather(inventories: Sequence[Inventory], *, repeats: bool) -> dict[tuple[int, int], _Remains]:
    """Read all inventories in one loop without calls, as there may be thousands of nodes.

    Equal ``sealed`` are mostly the same object; without ``repeats`` each object is read once.
    """
    worlds = {world.generation: world for each in inventories for world in each.worlds}
    remains: dict[tuple[int, int], _Remains] = {}
    notified: set[int] = set()
    known: _Remains | None = None  # those of the previous entry's snapshot
    generation: int | None = None
    step: int | None = None
    for inventory in inventories:
        name, sealed = inventory.node, inventory.sealed
        if repeats or id(sealed) not in notified:
            notified.add(id(sealed))
            for entry in sealed:
                if entry.step != step or entry.generation != generation:
                    generation, step = entry.generation, entry.step
                    known = _of(entry, worlds, remains)
                if known is not None:
                    known.add(entry)
        for entry in inventory.blocks:
            if entry.step != step or entry.generation != generation:
                generation, step = entry.generation, entry.step
                known = _of(entry, worlds, remains)
            if known is not None:
                rank = entry.rank
                if known.entries.get(rank) is not entry:
                    known.add(entry)
                if known.holders.setdefault(rank, name) is not name:
                    known.others.setdefault(rank, []).append(name)
        for parity in inventory.parities:
            if parity.step != step or parity.generation != generation:
                generation, step = parity.generation, parity.step
                known = _of(parity, worlds, remains)
    _spoil(inventories, worlds, remains)
    return remains


def _spoil(
    inventories: Sequence[Inventory],
    worlds: Mapping[int, SnapshotWorld],
    remains: dict[tuple[int, int], _Remains],
) -> None:
    for entry in [entry for each in inventories for entry in each.spoiled]:
        if (found := _of(entry, worlds, remains)) is not None:
            found.spoiled.add(entry.rank)


def _of(
    entry: BlockEntry | ParityEntry,
    worlds: Mapping[int, SnapshotWorld],
    remains: dict[tuple[int, int], _Remains],
) -> _Remains | None:
    """Return the remains of an entry's snapshot, or None if its group is not known."""
    key = (entry.generation, entry.step)
    found = remains.get(key)
    if found is None and (world := worlds.get(entry.generation)) is not None:
        found = remains[key] = _Remains(world, entry.step)
    return found


def _sources(
    remains: _Remains, inventories: Sequence[Inventory], live: Sequence[str]
) -> tuple[tuple[BlockSource, ...] | None, str]:
    world = remains.world
    ranks = range(len(world.rank_nodes))
    if remains.conflict:
        return None, remains.conflict
    if unknown := [rank for rank in ranks if rank not in remains.entries]:
        return None, f"ranks {unknown} had not sealed it"
    missing = [rank for rank in ranks if rank not in remains.holders]
    if reason := _unrecoverable(remains, missing, inventories):
        return None, reason
    nodes = list(map(remains.holder_of, ranks)) if remains.others else _first_of(remains)
    least = [(0, name) for name in live] if missing else []  # sorted, so a heap
    for rank in missing:
        load, nodes[rank] = least[0]
        heapreplace(least, (load + block_bytes(remains.entries[rank]), least[0][1]))
    lost = set(missing)
    sources = tuple(
        [
            BlockSource(rank=rank, node=node or "", rebuilt=rank in lost)
            for rank, node in enumerate(nodes)
        ]
    )
    if not missing:
        return sources, "every rank's block is in memory"
    where = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in missing)
    return sources, f"every rank's block is in memory or rebuilt from parity ({where})"


def _first_of(remains: _Remains) -> list[str | None]:
    return list(map(remains.holders.get, range(len(remains.world.rank_nodes))))


def _unrecoverable(
    remains: _Remains, missing: Sequence[int], inventories: Sequence[Inventory]
) -> str:
    """Return why one of the ``missing`` ranks cannot be rebuilt, or ""."""
    if not missing:
        return ""
    homes = {remains.world.rank_nodes[rank] for rank in missing}
    geometry = Geometry(remains.world, remains.entries, near=homes)
    holders = remains.holders
    needed = {stripe for rank in missing for stripe, *_ in geometry.pieces_of_block(rank)}
    reported = {
        (parity.stripe, parity.row): (inventory.node, parity)
        for inventory in inventories
        for parity in inventory.parities
        if parity.stripe in needed
        and parity.step == remains.step
        and parity.generation == remains.world.generation
    }
    rows = {
        place: node
        for place, (node, parity) in reported.items()
        if parity.nbytes == geometry.row_bytes(place[0])
    }
    for rank in missing:
        if rank in remains.spoiled:
            return f"the block of rank {rank}, rebuilt from parity, failed its checksum"
        plan, reason = plan_recovery(geometry, rank, holders=holders, rows=rows)
        if plan is None:
            home = remains.world.rank_nodes[rank]
            return f"the block of rank {rank} (node {home}) is gone and {reason}"
    return ""
