"""A group of books under any order of messages, repeats included, and any loss of m nodes.

No schedule may break this invariant: if any node believes a step to be protected, then after the
loss of any ``m`` nodes the survivors can restore that step or a newer one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations

from doubles.blocks import make_world
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.memory.records import BlockEntry, Inventory, ParityEntry, SnapshotWorld
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.core.book import (
    Book,
    CommitSnapshot,
    Instruction,
    Release,
    Snapshot,
    SnapshotPhase,
)


class Node:
    """A sidecar reduced to its book and its blocks."""

    def __init__(self, name: str, world: SnapshotWorld) -> None:
        self.name, self.world, self.book = name, world, Book()
        self.book.adopt(world, None)
        self.blocks: set[BlockEntry] = set()
        self.rows: set[ParityEntry] = set()

    def inventory(self) -> Inventory:
        snapshots = self.book.snapshots.values()
        return Inventory(
            node=self.name,
            worlds=(self.world,),
            blocks=tuple(self.blocks),
            parities=tuple(self.rows),
            sealed=tuple(entry for each in snapshots for entry in each.entries.values()),
        )


class Group:
    """Nodes and the messages between them, delivered in random order, some of them twice."""

    def __init__(self, world: SnapshotWorld, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.nodes = {peer.node: Node(peer.node, world) for peer in world.peers}
        self.network: list[Callable[[], None]] = []
        self.steps = [0] * len(world.rank_nodes)
        self.pieces: dict[tuple[int, int, int], set[str]] = {}

    def write(self, rank: int) -> None:
        """Have a rank seal its next step."""
        home = self.nodes[self.world.rank_nodes[rank]]
        self.steps[rank] += 1
        entry = BlockEntry(
            generation=1,
            step=self.steps[rank],
            rank=rank,
            payload_bytes=100 * (rank + 1),
            index_bytes=20,
            index_crc32c=self.steps[rank],
        )
        home.blocks.add(entry)
        for node in self.nodes.values():
            self.post(lambda node=node: self.perform(node, node.book.seal(entry)))  # type: ignore[misc]

    def post(self, message: Callable[[], None]) -> None:
        self.network += [message] * self.rng.choice((1, 1, 1, 2))

    def perform(self, node: Node, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, CommitSnapshot):
                self.send_pieces(node, each.snapshot)
            elif isinstance(each, Release):
                node.blocks = {b for b in node.blocks if b.step != each.key[1]}
                node.rows = {p for p in node.rows if p.step != each.key[1]}

    def send_pieces(self, owner: Node, snapshot: Snapshot) -> None:
        geometry, step = snapshot.geometry(), snapshot.step
        for stripe in range(geometry.n):
            k = geometry.columns(stripe)
            columns = {geometry.nodes[geometry.node_of(stripe, c)] for c in range(k)}
            for row in range(geometry.m):
                holder = self.nodes[geometry.nodes[geometry.node_of(stripe, k + row)]]
                parity = ParityEntry(
                    generation=1,
                    step=step,
                    stripe=stripe,
                    row=row,
                    nbytes=geometry.row_bytes(stripe),
                    crc32c=0,
                )
                if owner.name in columns:
                    self.post(
                        lambda h=holder, p=parity, c=columns: self.piece(h, p, owner, c)  # type: ignore[misc]
                    )

    def piece(self, holder: Node, parity: ParityEntry, owner: Node, columns: set[str]) -> None:
        """Deliver a piece; a holder that does not know the step yet has it sent again."""
        key = (1, parity.step)
        if holder.book.is_gone(key) or key not in owner.book.snapshots:
            return
        snapshot = holder.book.snapshots.get(key)
        if snapshot is None or snapshot.phase is SnapshotPhase.SEALING:
            self.network.append(lambda: self.piece(holder, parity, owner, columns))
            return
        place = (parity.step, parity.stripe, parity.row)
        self.pieces.setdefault(place, set()).add(owner.name)
        if self.pieces[place] == columns:
            holder.rows.add(parity)
            at = (parity.stripe, parity.row)
            for node in self.nodes.values():
                self.post(lambda n=node: self.perform(n, n.book.seal_row(key, at)))  # type: ignore[misc]

    def deliver(self) -> None:
        if self.network:
            self.network.pop(self.rng.randrange(len(self.network)))()

    def check_protection(self) -> None:
        believed = max(node.book.newest(SnapshotPhase.PROTECTED) for node in self.nodes.values())
        if believed < 0:
            return
        for lost in combinations(self.nodes, self.world.parity):
            live = [node.inventory() for name, node in self.nodes.items() if name not in lost]
            points, reason = restore_points(live)
            assert points, (lost, believed, reason)
            assert points[0].step >= believed, (lost, believed, reason)


@settings(max_examples=examples(60), deadline=None)
@given(
    n=st.integers(1, 4),
    parity=st.integers(0, 2),
    keep=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
def test_what_is_believed_protected_survives_any_m_losses(
    n: int, parity: int, keep: int, seed: int
) -> None:
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(n)]
    homes = [rng.choice(names) for _ in range(rng.randint(1, 4))]
    world = make_world(
        dict.fromkeys(names, "tcp://x"), rank_nodes=homes, parity=min(parity, n - 1), keep=keep
    )
    group = Group(world, rng)
    for _ in range(300):
        rank = rng.randrange(len(homes))
        ahead = group.steps[rank] - min(group.steps)
        if rng.random() < 0.1 and ahead < 2 and max(group.steps) < 5:
            group.write(rank)
        group.deliver()
        if rng.random() < 0.1:
            group.check_protection()
    while min(group.steps) < max(group.steps):
        group.write(group.steps.index(min(group.steps)))
    while group.network:
        group.deliver()
    group.check_protection()
    for node in group.nodes.values():
        assert (
            node.book.newest(SnapshotPhase.PROTECTED) == max(group.steps) or max(group.steps) == 0
        )
        assert len(node.book.snapshots) <= keep
