"""Where parity lies, what it protects, and what can be restored from what is left. Pure.

The ``n`` nodes of a group guard each other with ``m`` parity rows per stripe, ``k = n - m``. The
*node block* of a node is its ranks' blocks in rank order, each padded to 64 bytes; it is cut into
``k`` *pieces* of equal length. Stripe ``s`` keeps its parity rows on nodes ``s … s+m-1`` and takes
one piece from each of the other ``k`` nodes (all modulo ``n``), so every node has exactly one
fragment in each of the ``n`` stripes, and losing any ``m`` nodes loses ``m`` fragments of each.
Bytes behind the end of a node block are zeros and never sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt.block import align, block_bytes
from ckpt.world import (
    BlockEntry,
    BlockSource,
    Inventory,
    ParityEntry,
    RestorePoint,
    SnapshotWorld,
)

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes ``at … at+nbytes`` of rank's block, to be put ``into`` a buffer."""

    rank: int
    at: int
    nbytes: int
    into: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """A piece its owner sends to a parity holder: ``column`` of ``stripe``, for ``row``."""

    stripe: int
    column: int
    row: int
    holder: str
    nbytes: int


class Geometry:
    """The stripes of one snapshot, from who is in the group and how long every block is."""

    def __init__(self, world: SnapshotWorld, entries: Mapping[int, BlockEntry]) -> None:
        if set(entries) != set(range(len(world.rank_nodes))):
            raise ValueError(f"entries of ranks {sorted(entries)}, world has {world.rank_nodes}")
        self.nodes = tuple(peer.node for peer in world.peers)
        self.n, self.m = len(self.nodes), world.parity
        self.k = self.n - self.m
        self._places: list[list[tuple[int, int, int]]] = [[] for _ in self.nodes]
        totals = [0] * self.n
        for rank, name in enumerate(world.rank_nodes):
            node, length = self.nodes.index(name), block_bytes(entries[rank])
            self._places[node].append((rank, totals[node], length))
            totals[node] += align(length, ALIGN_BYTES)
        self.node_bytes = tuple(totals)
        self.piece_bytes = align(-(-max(totals, default=0) // self.k), ALIGN_BYTES)

    def node_of(self, stripe: int, number: int) -> int:
        """Return the node of fragment ``number``: data columns first, then parity rows."""
        if number < self.k:
            return (stripe + self.m + number) % self.n
        return (stripe + number - self.k) % self.n

    def piece_of(self, column: int) -> int:
        """Return which piece of its node block a column is; the same in every stripe."""
        return self.k - 1 - column

    def filled_bytes(self, stripe: int, column: int) -> int:
        """Return how many bytes of a data column are not the zeros behind its node block."""
        start = self.piece_of(column) * self.piece_bytes
        left = self.node_bytes[self.node_of(stripe, column)] - start
        return min(max(left, 0), self.piece_bytes)

    def row_bytes(self, stripe: int) -> int:
        """Return the length of the parity rows of ``stripe``: all behind it would be zeros."""
        return max(self.filled_bytes(stripe, column) for column in range(self.k))

    def rows_of(self, node: str) -> tuple[tuple[int, int], ...]:
        """Return the (stripe, row) pairs ``node`` holds."""
        number = self.nodes.index(node)
        return tuple(((number - row) % self.n, row) for row in range(self.m))

    def duties_of(self, node: str) -> tuple[Duty, ...]:
        """Return every piece ``node`` has to send, in an order that spreads the receivers."""
        number = self.nodes.index(node)
        duties = []
        for step in range(1, self.k + 1):
            stripe = (number + step) % self.n
            column = (number - stripe - self.m) % self.n
            nbytes = self.filled_bytes(stripe, column)
            for row in range(self.m if nbytes else 0):
                holder = self.nodes[self.node_of(stripe, self.k + row)]
                duties.append(
                    Duty(stripe=stripe, column=column, row=row, holder=holder, nbytes=nbytes)
                )
        return tuple(duties)

    def spans(self, stripe: int, column: int, lo: int, hi: int) -> tuple[Span, ...]:
        """Return what fills bytes ``lo … hi`` of a data column; the gaps are zeros."""
        start = self.piece_of(column) * self.piece_bytes
        first, last = start + lo, start + hi
        spans = []
        for rank, at, length in self._places[self.node_of(stripe, column)]:
            a, b = max(at, first), min(at + length, last)
            if a < b:
                spans.append(Span(rank=rank, at=a - at, nbytes=b - a, into=a - first))
        return tuple(spans)

    def pieces_of_block(self, rank: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (stripe, column, lo, hi, at) for every part of rank's block, in order.

        Bytes ``lo … hi`` of that column are bytes ``at …`` of the block.
        """
        for node, places in enumerate(self._places):
            for owner, start, length in places:
                if owner != rank or not length:
                    continue
                end = start + length
                for piece in range(start // self.piece_bytes, -(-end // self.piece_bytes)):
                    base = piece * self.piece_bytes
                    lo, hi = max(start - base, 0), min(end - base, self.piece_bytes)
                    yield (node + 1 + piece) % self.n, self.k - 1 - piece, lo, hi, base + lo - start


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRead:
    """Where the bytes of a surviving data column are: each span with the node that has it."""

    column: int
    spans: tuple[tuple[Span, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRead:
    """Which node holds a parity row."""

    row: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One part of a lost block: bytes ``lo … hi`` of ``column``, decoded from ``k`` others."""

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
) -> tuple[tuple[Recovery, ...] | None, str]:
    """Plan how to rebuild rank's block from what is left, or say why it cannot be.

    ``holders`` maps ranks to a node that has their block, ``rows`` maps (stripe, row) to the node
    that has that parity row.
    """
    plan = []
    for stripe, column, lo, hi, at in geometry.pieces_of_block(rank):
        columns = []
        for other in range(geometry.k):
            spans = geometry.spans(stripe, other, lo, hi)
            if other != column and all(span.rank in holders for span in spans):
                placed = tuple((span, holders[span.rank]) for span in spans)
                columns.append(ColumnRead(column=other, spans=placed))
        columns.sort(key=lambda read: len(read.spans))  # zeros cost nothing
        needed = geometry.k - len(columns)
        kept = [
            RowRead(row=row, node=rows[stripe, row])
            for row in range(geometry.m)
            if (stripe, row) in rows
        ]
        if len(kept) < needed:
            have = len(columns) + len(kept)
            return None, f"stripe {stripe} has {have} of the {geometry.k} fragments it needs"
        plan.append(
            Recovery(
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


class _Remains:
    """What all inventories together say of one (generation, step)."""

    def __init__(self, world: SnapshotWorld, step: int) -> None:
        self.world, self.step = world, step
        self.entries: dict[int, BlockEntry] = {}
        self.holders: dict[int, list[str]] = {}
        self.rows: dict[tuple[int, int], tuple[str, ParityEntry]] = {}
        self.spoiled: set[int] = set()
        self.conflict = ""

    def add(self, entry: BlockEntry, *, holder: str | None) -> None:
        known = self.entries.setdefault(entry.rank, entry)
        if known != entry:
            self.conflict = f"rank {entry.rank} was sealed twice, as {known} and {entry}"
        elif holder is not None:
            self.holders.setdefault(entry.rank, []).append(holder)


def restore_points(inventories: Sequence[Inventory]) -> tuple[list[RestorePoint], str]:
    """Return every restorable snapshot, newest first, and why it is these and no newer ones.

    A snapshot is restorable when each rank's block is held by a live sidecar (one with an
    inventory) or can be rebuilt from parity. Newer generations come first: what they hold
    superseded whatever an older one still has.
    """
    remains = _collect(inventories)
    live = sorted(inventory.node for inventory in inventories)
    points: list[RestorePoint] = []
    reasons: list[str] = []
    for key in sorted(remains, reverse=True):
        sources, reason = _sources(remains[key], live)
        words = f"step {key[1]} of generation {key[0]}"
        if sources is None:
            reasons.append(f"{words} cannot be restored: {reason}")
            continue
        if not points:
            reasons.append(f"{words}: {reason}")
        points.append(RestorePoint(world=remains[key].world, step=key[1], sources=sources))
    return points, "; ".join(reasons) or f"no snapshot in the memory of nodes {live or 'none'}"


def _collect(inventories: Sequence[Inventory]) -> dict[tuple[int, int], _Remains]:
    worlds = {world.generation: world for each in inventories for world in each.worlds}
    remains: dict[tuple[int, int], _Remains] = {}

    def of(entry: BlockEntry | ParityEntry) -> _Remains | None:
        world = worlds.get(entry.generation)
        if world is None:
            return None
        key = (entry.generation, entry.step)
        return remains.setdefault(key, _Remains(world, entry.step))

    for inventory in sorted(inventories, key=lambda each: each.node):
        for entry in inventory.sealed:
            if (known := of(entry)) is not None:
                known.add(entry, holder=None)
        for entry in inventory.blocks:
            if (known := of(entry)) is not None:
                known.add(entry, holder=inventory.node)
        for entry in inventory.spoiled:
            if (known := of(entry)) is not None:
                known.spoiled.add(entry.rank)
        for parity in inventory.parities:
            if (known := of(parity)) is not None:
                known.rows[parity.stripe, parity.row] = (inventory.node, parity)
    return remains


def _sources(remains: _Remains, live: Sequence[str]) -> tuple[tuple[BlockSource, ...] | None, str]:
    world = remains.world
    ranks = range(len(world.rank_nodes))
    if remains.conflict:
        return None, remains.conflict
    if unknown := [rank for rank in ranks if rank not in remains.entries]:
        return None, f"ranks {unknown} had not sealed it"
    missing = [rank for rank in ranks if rank not in remains.holders]
    if reason := _unrecoverable(remains, missing):
        return None, reason
    load = dict.fromkeys(live, 0)
    sources = []
    for rank in ranks:
        if rank in remains.holders:
            holders, home = remains.holders[rank], world.rank_nodes[rank]
            node = home if home in holders else min(holders)
        else:
            node = min(live, key=lambda name: (load[name], name))
            load[node] += block_bytes(remains.entries[rank])
        sources.append(BlockSource(rank=rank, node=node, rebuilt=rank in missing))
    if not missing:
        return tuple(sources), "every rank's block is held"
    where = ", ".join(
        f"rank {source.rank} on {source.node}" for source in sources if source.rebuilt
    )
    return tuple(sources), f"every rank's block is held or rebuilt from parity ({where})"


def _unrecoverable(remains: _Remains, missing: Sequence[int]) -> str:
    """Return why one of the ``missing`` ranks cannot be rebuilt, or nothing."""
    if not missing:
        return ""
    geometry = Geometry(remains.world, remains.entries)
    holders = {rank: nodes[0] for rank, nodes in remains.holders.items()}
    rows = {
        place: node
        for place, (node, parity) in remains.rows.items()
        if place[0] < geometry.n and parity.nbytes == geometry.row_bytes(place[0])
    }
    for rank in missing:
        if rank in remains.spoiled:
            return f"the block of rank {rank}, rebuilt from parity, failed its checksum"
        plan, reason = plan_recovery(geometry, rank, holders=holders, rows=rows)
        if plan is None:
            home = remains.world.rank_nodes[rank]
            return f"the block of rank {rank} (node {home}) is gone and {reason}"
    return ""
