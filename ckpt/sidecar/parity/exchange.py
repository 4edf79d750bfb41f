"""Gossip between the sidecars of a group about sealed blocks, and the building of their parity.

Every message is repeated until it is answered or its generation is over, and may arrive twice. Each
peer has queues of its own, so a slow or dead one delays no other. The bytes of columns are not
pushed: the holder of a parity row requests them (`holdfast.ckpt.sidecar.parity.builder`).
"""

from __future__ import annotations

from collections import deque
from time import monotonic

from holdfast.ckpt.errors import FencedError
from holdfast.ckpt.memory.block import block_bytes
from holdfast.ckpt.memory.records import BlockEntry, ParityEntry, SidecarPeer
from holdfast.ckpt.sidecar.core.book import Snapshot, SnapshotKey
from holdfast.ckpt.sidecar.core.core import Core, Op
from holdfast.ckpt.sidecar.core.links import PeerQueue, send
from holdfast.ckpt.sidecar.core.messages import Key, Message, RowSealed, Sealed, unparse
from holdfast.ckpt.sidecar.parity.builder import Builder
from holdfast.ckpt.sidecar.parity.columns import Columns
from holdfast.ckpt.sidecar.parity.rows import Parities
from holdfast.ckpt.transport import Request
from holdfast.ckpt.types import Json

FRAGMENT_LANES = 2
"""The number of fragment requests in flight to one peer at a time."""


class ParityExchange:
    """Gossip and parity of the present generation's group."""

    def __init__(self, core: Core, parities: Parities) -> None:
        self._core, self._parities = core, parities
        self._columns = Columns(core)
        self.builder = Builder(core, parities, link=self._fragments, on_sealed=self._row_complete)
        self._links: dict[tuple[str, str], PeerQueue] = {}
        self._sealed_at_s: dict[SnapshotKey, float] = {}
        self._protect_s: deque[float] = deque(maxlen=64)
        self._restorable_s: float | None = None  # seal time of the last protected snapshot

    def ops(self) -> dict[str, Op]:
        """Return the operations of this part."""
        return {
            "sealed": (Sealed, self._hear_sealed),
            "given_up": (Key, self._hear_given_up),
            "row_sealed": (RowSealed, self._hear_row),
            **self._columns.ops(),
        }

    # -- links -----------------------------------------------------------------------------------

    def peers(self) -> tuple[SidecarPeer, ...]:
        """Return the other members of the present group."""
        world = self._core.book.world
        return tuple(p for p in (world.peers if world else ()) if p.node != self._core.node)

    def link(self, peer: SidecarPeer, *, purpose: str, lanes: int = 1) -> PeerQueue:
        """Return the queue to a peer for a purpose; made at the first need."""
        at = (peer.node, purpose)
        if at not in self._links:
            self._links[at] = PeerQueue(peer, self._core.key, purpose=purpose, lanes=lanes)
        return self._links[at]

    def _fragments(self, node: str) -> PeerQueue:
        """Return the queue for the fragments of a node of the present group."""
        with self._core.lock:
            for peer in self.peers():
                if peer.node == node:
                    return self.link(peer, purpose="fragments", lanes=FRAGMENT_LANES)
        raise FencedError(f"node {node} is not in the present group")

    def tell_all(self, op: str, message: Message, *, about: SnapshotKey | None = None) -> None:
        """Send a message to every peer, until each has answered or the generation ends.

        A message ``about`` a snapshot is no longer sent once that is released.
        """
        body, book = unparse(message), self._core.book
        for peer in self.peers():
            self.link(peer, purpose="gossip").put(
                lambda client: send(client, op, body),
                is_wanted=lambda: about is None or not book.is_gone(about),
            )

    def close(self) -> None:
        """End all queues, and build no more."""
        self.builder.close()
        self._end_links()

    def _end_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    def adopted(self) -> None:
        """A generation began: its group is another, so nothing is sent to the one before."""
        self.builder.cancel()
        self._end_links()
        self._sealed_at_s.clear()

    def released(self, key: SnapshotKey) -> None:
        """Build and keep nothing more of a snapshot."""
        self._columns.released(key)
        self.builder.cancel(key)
        self._parities.drop(key)
        self._sealed_at_s.pop(key, None)

    # -- sealing ---------------------------------------------------------------------------------

    def announce(self, entry: BlockEntry) -> None:
        """Tell the group that a block is sealed here."""
        key = (entry.generation, entry.step)
        self._sealed_at_s.setdefault(key, monotonic())
        self.tell_all("sealed", Sealed(entries=(entry,)), about=key)

    def give_up(self, generation: int, step: int) -> None:
        """Tell the group that a rank here will not complete a step."""
        self.tell_all("given_up", Key(generation=generation, step=step))

    def _hear_sealed(self, request: Request, body: Sealed) -> None:
        for entry in body.entries:
            self._core.apply(self._core.book.seal(entry))
        request.reply()

    def _hear_given_up(self, request: Request, body: Key) -> None:
        key = (body.generation, body.step)
        self._core.apply(self._core.book.give_up(key))
        request.reply()

    # -- parity ----------------------------------------------------------------------------------

    def committed(self, snapshot: Snapshot) -> None:
        """Every rank has sealed: build the rows this node holds."""
        if snapshot.world.parity:
            self.builder.begin(snapshot, self._columns.geometry(snapshot))

    def _row_complete(self, entry: ParityEntry) -> None:
        core, key = self._core, (entry.generation, entry.step)
        if core.book.generation != entry.generation or core.book.is_closed:
            return
        self.tell_all("row_sealed", RowSealed(entry=entry), about=key)
        core.apply(core.book.seal_row(key, (entry.stripe, entry.row)))

    def _hear_row(self, request: Request, body: RowSealed) -> None:
        key = (body.entry.generation, body.entry.step)
        self._core.apply(self._core.book.seal_row(key, (body.entry.stripe, body.entry.row)))
        request.reply()

    # -- reporting -------------------------------------------------------------------------------

    def protected(self, snapshot: Snapshot) -> None:
        """Keep the rows of a snapshot, and note how long it took."""
        self._parities.mark_protected(snapshot.key)
        self._restorable_s = self._sealed_at_s.get(snapshot.key, monotonic())
        if (began_s := self._sealed_at_s.pop(snapshot.key, None)) is not None:
            took_s = monotonic() - began_s
            self._protect_s.append(took_s)
            nbytes = sum(block_bytes(entry) for entry in snapshot.entries.values())
            self._core.meters.add("protect", took_s, nbytes)

    def status(self) -> dict[str, Json]:
        """Return the queues by peer, and the seconds from seal to protected of recent steps."""
        return {
            "peers": {
                f"{node}/{purpose}": link.status()
                for (node, purpose), link in sorted(self._links.items())
            },
            "seal_to_protected_s": [round(each, 6) for each in self._protect_s],
            "restore_point_age_s": self._restorable_s
            and round(monotonic() - self._restorable_s, 3),
            **self.builder.status(),
        }
