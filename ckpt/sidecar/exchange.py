"""How the sidecars of a group tell each other what is sealed, and send each other fragments.

Every message is repeated until it is answered or its generation is over, and may arrive twice.
Each peer has queues of its own, so a slow or dead one holds up nobody else.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeAlias

from ckpt.errors import CkptError, CorruptError, FencedError, NotFoundError, PeerError
from ckpt.isal import crc32c
from ckpt.sidecar.core import Core, Op
from ckpt.sidecar.messages import Fragment, Key, Message, RowSealed, Sealed, unparse
from ckpt.sidecar.parity import Parities
from ckpt.sidecar.slots import Slot
from ckpt.sidecar.state import Snapshot, SnapshotKey
from ckpt.sidecar.wire import PART_BYTES
from ckpt.stripes import Duty, Geometry
from ckpt.transport import Client, Request, RunKey
from ckpt.types import Json
from ckpt.world import BlockEntry, ParityEntry, SidecarPeer, SnapshotWorld

_log = logging.getLogger(__name__)

Job: TypeAlias = Callable[[Client], None]
"""Talks to a peer; repeated while it raises `PeerError`."""

CALL_TIMEOUT_S = 5.0
_BACKOFF_S = (0.005, 0.5)
_WORTH_REPEATING = ("", "NotFoundError", "CorruptError")
"""Refusals that pass: no answer, a peer that is not that far yet, bytes lost on the way."""


class Link:
    """A queue of jobs for one peer, worked off in order by a thread of its own."""

    def __init__(self, peer: SidecarPeer, key: RunKey, *, purpose: str) -> None:
        self.peer, self.error = peer, ""
        self._jobs: deque[Job] = deque()
        self._ready = threading.Condition()
        self._closed = False
        self._client = Client(peer.address, key, timeout_s=CALL_TIMEOUT_S, watch=True)
        self._thread = threading.Thread(
            target=self._work, name=f"{purpose}-{peer.node}", daemon=True
        )
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job."""
        with self._ready:
            self._jobs.append(job)
            self._ready.notify()

    @property
    def queued(self) -> int:
        """How many jobs are not done."""
        return len(self._jobs)

    def close(self) -> None:
        """Drop what is queued and end the thread; a call under way ends by its own deadline."""
        with self._ready:
            self._closed = True
            self._jobs.clear()
            self._ready.notify()

    def _work(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._closed or self._jobs)
                if self._closed:
                    break
                job = self._jobs[0]
            self._repeat(job)
            with self._ready:
                if self._jobs and self._jobs[0] is job:
                    self._jobs.popleft()
        self._client.close()

    def _repeat(self, job: Job) -> None:
        pause_s, longest_s = _BACKOFF_S
        while not self._closed:
            try:
                job(self._client)
            except PeerError as error:
                self.error = str(error)
                if not is_passing(error):
                    _log.warning("%s refused: %s", self.peer.node, error)
                    return
            except CkptError as error:  # fenced, or what was to be sent is gone
                self.error = str(error)
                return
            else:
                self.error = ""
                return
            with self._ready:
                self._ready.wait_for(lambda: self._closed, timeout=pause_s)
            pause_s = min(pause_s * 2, longest_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outgoing:
    """A part of a piece: where its bytes are, and the slots to keep while they are read."""

    data: Any
    slots: tuple[Slot, ...]


class Exchange:
    """Gossip and parity of the present generation's group."""

    def __init__(self, core: Core, parities: Parities) -> None:
        self._core, self._parities = core, parities
        self._links: dict[tuple[str, str], Link] = {}
        self._sealed_at_s: dict[SnapshotKey, float] = {}
        self._protect_s: deque[float] = deque(maxlen=64)
        core.on.adopt.append(self._adopt)
        core.on.commit.append(self._commit)
        core.on.protect.append(self._protected)
        core.on.release.append(self._release)

    def ops(self) -> dict[str, Op]:
        """Return what this part answers."""
        return {
            "sealed": (Sealed, self._hear_sealed),
            "given_up": (Key, self._hear_given_up),
            "fragment": (Fragment, self._hear_fragment),
            "row_sealed": (RowSealed, self._hear_row),
        }

    # -- links -----------------------------------------------------------------------------------

    def peers(self) -> tuple[SidecarPeer, ...]:
        """Return the other members of the present group."""
        world = self._core.book.world
        return tuple(p for p in (world.peers if world else ()) if p.node != self._core.node)

    def link(self, peer: SidecarPeer, *, purpose: str) -> Link:
        """Return the queue to a peer for a purpose; made when first needed."""
        at = (peer.node, purpose)
        if at not in self._links:
            self._links[at] = Link(peer, self._core.key, purpose=purpose)
        return self._links[at]

    def tell_all(self, op: str, message: Message) -> None:
        """Send a message to every peer, until each has answered or the generation ends."""
        body = unparse(message)
        for peer in self.peers():
            self.link(peer, purpose="gossip").put(lambda client: send(client, op, body))

    def close(self) -> None:
        """End all queues."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _adopt(self, _world: SnapshotWorld) -> None:
        self.close()
        self._sealed_at_s.clear()
        for row in self._parities.unfinished():
            self._parities.drop_row(row)

    def _release(self, key: SnapshotKey) -> None:
        self._parities.drop(key)
        self._sealed_at_s.pop(key, None)

    # -- sealing ---------------------------------------------------------------------------------

    def announce(self, entry: BlockEntry) -> None:
        """Tell the group that a block is sealed here."""
        self._sealed_at_s.setdefault((entry.generation, entry.step), monotonic())
        self.tell_all("sealed", Sealed(entries=(entry,)))

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

    # -- parity, as holder -----------------------------------------------------------------------

    def _hear_fragment(self, request: Request, body: Fragment) -> None:
        key, place = (body.generation, body.step), (body.stripe, body.row)
        book = self._core.book
        book.require(body.generation)
        if book.is_gone(key):
            request.reply()
            return
        if (row := self._parities.get(key, place)) is None:
            raise NotFoundError(f"step {body.step} is not known to be sealed here yet; try again")
        if len(request.frames) != 1:
            raise CorruptError("a fragment without its bytes; send it again")
        data = request.frames[0]

        def add() -> None:
            if crc32c(data) != body.crc32c:
                raise CorruptError("a fragment fails its checksum; send it again")
            entry = self._parities.add(row, body.column, body.at, data)
            request.reply()
            if entry is not None:
                self._row_complete(entry)

        self._core.submit(request, add)

    def _row_complete(self, entry: ParityEntry) -> None:
        core, key = self._core, (entry.generation, entry.step)
        with core.lock:
            if core.book.generation != entry.generation or core.book.is_closed:
                return
            self.tell_all("row_sealed", RowSealed(entry=entry))
            core.apply(core.book.seal_row(key, (entry.stripe, entry.row)))

    def _hear_row(self, request: Request, body: RowSealed) -> None:
        key = (body.entry.generation, body.entry.step)
        self._core.apply(self._core.book.seal_row(key, (body.entry.stripe, body.entry.row)))
        request.reply()

    # -- parity, as owner of data ----------------------------------------------------------------

    def _commit(self, snapshot: Snapshot) -> None:
        """Every rank has sealed: make room for parity, send the pieces others need."""
        core, key = self._core, snapshot.key
        if snapshot.world.parity == 0:
            return
        geometry = snapshot.geometry()
        for row in self._parities.prepare(key, geometry, core.node):
            if entry := Parities.seal(row):  # nothing but zeros: complete as it is
                self._row_complete(entry)
        sealed = Sealed(entries=tuple(snapshot.entries.values()))
        addresses = {peer.node: peer for peer in snapshot.world.peers}
        duties = geometry.duties_of(core.node)
        for holder in dict.fromkeys(duty.holder for duty in duties):
            link = self.link(addresses[holder], purpose="fragments")
            link.put(lambda client: send(client, "sealed", unparse(sealed)))
            for duty in (each for each in duties if each.holder == holder):
                for at in range(0, duty.nbytes, PART_BYTES):
                    link.put(self._sender(key, geometry, duty, at))

    def _sender(self, key: SnapshotKey, geometry: Geometry, duty: Duty, at: int) -> Job:
        nbytes = min(PART_BYTES, duty.nbytes - at)

        def send(client: Client) -> None:
            outgoing = self._pick(key, geometry, duty, at, at + nbytes)
            try:
                message = Fragment(
                    generation=key[0],
                    step=key[1],
                    stripe=duty.stripe,
                    row=duty.row,
                    column=duty.column,
                    at=at,
                    crc32c=crc32c(outgoing.data),
                )
                client.call("fragment", unparse(message), [outgoing.data])
                self._core.counters["fragment_bytes_sent"] += nbytes
            finally:
                self._core.unpin(*outgoing.slots)

        return send

    def _pick(
        self, key: SnapshotKey, geometry: Geometry, duty: Duty, lo: int, hi: int
    ) -> _Outgoing:
        """Return bytes ``lo … hi`` of a piece, its slots pinned; without a copy if in one block.

        Raises ``FencedError`` when the snapshot is not wanted any more.
        """
        core = self._core
        spans = geometry.spans(duty.stripe, duty.column, lo, hi)
        with core.lock:
            slots = [core.slots.holding((*key, span.rank)) for span in spans]
            held = tuple(slot for slot in slots if slot is not None)
            if len(held) < len(spans) or key not in core.book.snapshots:
                raise FencedError(f"step {key[1]} of generation {key[0]} is not wanted any more")
            for slot in held:
                core.slots.pin(slot)
        if len(spans) == 1 and spans[0].nbytes == hi - lo:
            view = held[0].view()[spans[0].at : spans[0].at + spans[0].nbytes]
            return _Outgoing(data=view, slots=held)
        data = bytearray(hi - lo)
        for span, slot in zip(spans, held, strict=True):
            data[span.into : span.into + span.nbytes] = slot.view()[span.at : span.at + span.nbytes]
        return _Outgoing(data=data, slots=held)

    # -- reporting -------------------------------------------------------------------------------

    def _protected(self, snapshot: Snapshot) -> None:
        if (began_s := self._sealed_at_s.pop(snapshot.key, None)) is not None:
            self._protect_s.append(monotonic() - began_s)

    def status(self) -> dict[str, Json]:
        """Return the queues by peer, and the seconds from seal to protected of recent steps."""
        return {
            "peers": {
                f"{node}/{purpose}": {"queued": link.queued, "error": link.error}
                for (node, purpose), link in sorted(self._links.items())
            },
            "seal_to_protected_s": [round(each, 6) for each in self._protect_s],
        }


def is_passing(error: PeerError) -> bool:
    """Return whether what was refused is worth repeating."""
    return error.kind in _WORTH_REPEATING


def send(client: Client, op: str, body: Json) -> None:
    """Ask for nothing but an acknowledgement."""
    client.call(op, body)
