"""A simulated sidecar without bytes: the production `Book`, and its blocks and parity rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from holdfast.ckpt.errors import FencedError, NotFoundError
from holdfast.ckpt.memory.records import (
    BlockEntry,
    Inventory,
    ParityEntry,
    RestorePoint,
    SnapshotWorld,
)
from holdfast.ckpt.sidecar.core.book import (
    Book,
    CommitSnapshot,
    Instruction,
    Protect,
    Release,
    SnapshotKey,
)

_RETRY_S = 0.02
_MAX_RETRIES = 200


class Network(Protocol):
    """The simulation's interface for a simulated sidecar."""

    def post(
        self, source: SimulatedSidecar, address: str, act: Callable[[SimulatedSidecar], None]
    ) -> None:
        """Make the sidecar at ``address`` act later, maybe twice, unless either is gone first."""

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` after ``delay_s``."""

    def sealed(self, sidecar: SimulatedSidecar, key: SnapshotKey) -> None:
        """Note that a sidecar has accepted a worker's block."""

    def protected(self, sidecar: SimulatedSidecar, key: SnapshotKey) -> None:
        """Note that a sidecar sees a snapshot as protected."""


PAYLOAD_BYTES: Final = 1000
"""The approximate length of a block; so small that only the first piece of a node block is nonzero.
"""


def block_entry(key: SnapshotKey, rank: int, *, payload_bytes: int = PAYLOAD_BYTES) -> BlockEntry:
    """Return the entry of rank's block; blocks differ in length."""
    return BlockEntry(
        generation=key[0],
        step=key[1],
        rank=rank,
        payload_bytes=payload_bytes + 8 * rank,
        index_bytes=96,
        index_crc32c=0,
    )


class SimulatedSidecar:
    """The contents of one sidecar process; they end with it."""

    def __init__(
        self, node: str, *, address: str, network: Network, payload_bytes: int = PAYLOAD_BYTES
    ) -> None:
        self.node, self.address, self._network = node, address, network
        self._payload_bytes = payload_bytes
        self.alive = True
        self.book = Book()
        self._blocks: dict[tuple[SnapshotKey, int], BlockEntry] = {}
        self._rows: dict[SnapshotKey, tuple[ParityEntry, ...]] = {}

    def end(self) -> None:
        """End the process, with its contents."""
        self.alive = False
        self.book = Book()
        self._blocks, self._rows = {}, {}

    def adopt(self, world: SnapshotWorld, *, restore: RestorePoint | None) -> None:
        """Enter a generation: refuse older ones from now on, and drop abandoned snapshots."""
        if self.alive and world.generation >= self.book.generation:
            self._carry_out(self.book.adopt(world, restore))

    def acquire(self, key: SnapshotKey) -> bool:
        """Let a worker write a block; False if it must ask again. Raises ``FencedError``."""
        if not self.alive:
            return False
        try:
            self.book.require_open(key[0])
        except NotFoundError:
            return False
        return True

    def seal(self, key: SnapshotKey, rank: int) -> None:
        """Accept a rank's block and tell the group, unless its generation is over."""
        entry = block_entry(key, rank, payload_bytes=self._payload_bytes)
        if not self.alive or self.book.is_closed or key[0] != self.book.generation:
            return
        if self.book.is_gone(key):
            return
        self._network.sealed(self, key)
        self._blocks[key, rank] = entry
        self._tell(lambda book: book.seal(entry))

    def inventory(self) -> Inventory:
        """Return the contents that can be served, and accept nothing more of this generation."""
        self.book.close()
        snapshots = self.book.snapshots
        worlds = {each.world.generation: each.world for each in snapshots.values()}
        return Inventory(
            node=self.node,
            worlds=tuple(worlds[number] for number in sorted(worlds)),
            blocks=tuple(entry for (key, _), entry in self._blocks.items() if key in snapshots),
            parities=tuple(
                row for key, rows in self._rows.items() if key in snapshots for row in rows
            ),
            sealed=tuple(e for each in snapshots.values() for e in each.entries.values()),
        )

    def has_block(self, key: SnapshotKey, rank: int) -> bool:
        """Return whether a rank's block is here."""
        return (key, rank) in self._blocks

    def has_row(self, key: SnapshotKey, place: tuple[int, int]) -> bool:
        """Return whether a (stripe, row) is here."""
        return any((row.stripe, row.row) == place for row in self._rows.get(key, ()))

    def _tell(self, event: Callable[[Book], list[Instruction]]) -> None:
        """Apply an event, then send it to every other sidecar of the group."""
        world = self.book.world
        assert world is not None
        self._carry_out(event(self.book))
        for peer in world.peers:
            if peer.address == self.address:
                continue
            self._send(peer.address, event, generation=world.generation, retries=0)

    def _send(
        self,
        address: str,
        event: Callable[[Book], list[Instruction]],
        *,
        generation: int,
        retries: int,
    ) -> None:
        def deliver(sidecar: SimulatedSidecar) -> None:
            try:
                sidecar._carry_out(event(sidecar.book))
            except FencedError:
                return
            except NotFoundError:
                if self.alive and self.book.generation == generation and retries < _MAX_RETRIES:
                    self._network.later(_RETRY_S, again)

        def again() -> None:
            self._send(address, event, generation=generation, retries=retries + 1)

        self._network.post(self, address, deliver)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case CommitSnapshot(snapshot=snapshot):
                    self._network.later(_RETRY_S, partial(self._encode, snapshot.key))
                case Protect(snapshot=snapshot):
                    self._network.protected(self, snapshot.key)
                case Release(key=key):
                    self._rows.pop(key, None)
                    self._blocks = {k: v for k, v in self._blocks.items() if k[0] != key}

    def _encode(self, key: SnapshotKey) -> None:
        """Compute this node's parity rows of a committed snapshot, and tell the group."""
        snapshot = self.book.snapshots.get(key)
        if not self.alive or self.book.is_closed or snapshot is None:
            return
        if key[0] != self.book.generation:
            return
        geometry = snapshot.geometry()
        self._rows[key] = tuple(
            ParityEntry(
                generation=key[0],
                step=key[1],
                stripe=stripe,
                row=row,
                nbytes=geometry.row_bytes(stripe),
                crc32c=0,
            )
            for stripe, row in geometry.rows_of(self.node)
        )
        for place in geometry.rows_of(self.node):
            self._tell(partial(Book.seal_row, key=key, place=place))
