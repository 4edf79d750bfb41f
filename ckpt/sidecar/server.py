"""A sidecar: its parts assembled behind one authenticated socket."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import msgspec

from holdfast.ckpt.errors import NotFoundError, PeerError
from holdfast.ckpt.memory.arena import Arena
from holdfast.ckpt.memory.block import SlotState
from holdfast.ckpt.memory.records import BlockEntry, RestorePoint, SnapshotWorld
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.sidecar.config import SidecarConfig
from holdfast.ckpt.sidecar.core.book import Snapshot, SnapshotPhase
from holdfast.ckpt.sidecar.core.core import Core, Listeners, Op
from holdfast.ckpt.sidecar.core.durable_note import Note
from holdfast.ckpt.sidecar.core.lease_page import LeasePage
from holdfast.ckpt.sidecar.core.messages import Adopt, Nothing, parse
from holdfast.ckpt.sidecar.disk.tier import Disk
from holdfast.ckpt.sidecar.logs.operations import RecordLogs
from holdfast.ckpt.sidecar.machine import machine
from holdfast.ckpt.sidecar.parity.differences import Differences
from holdfast.ckpt.sidecar.parity.exchange import ParityExchange
from holdfast.ckpt.sidecar.parity.rows import Parities
from holdfast.ckpt.sidecar.persist.persistence import Persistence
from holdfast.ckpt.sidecar.persist.save_on_stop import LateSave
from holdfast.ckpt.sidecar.reading.operations import ReadOperations
from holdfast.ckpt.sidecar.reading.rebuild import Rebuild
from holdfast.ckpt.sidecar.writing.operations import WriteOperations
from holdfast.ckpt.sidecar.writing.room import SlotRoom
from holdfast.ckpt.transport import Request, RunKey, Server, answers_refused
from holdfast.ckpt.types import Json

_log = logging.getLogger(__name__)
_WORLDS = "worlds"
_ENTRIES = "entries"
_SAVED_POLL_S = 0.02


class Sidecar:
    """Serves one node's arenas until a `stop` request sets `stopped`."""

    def __init__(self, config: SidecarConfig, key: RunKey) -> None:
        self.config = config
        self.stopped = threading.Event()
        self._removing = False
        arena = Arena.open(Path(config.arena_dir), run=config.run)
        host = config.memory_of
        self.core = core = Core(arena, key, run=config.run, node=config.node, host=host)
        self._worlds = Note(arena.directory, _WORLDS)
        self._entries = Note(arena.directory, _ENTRIES)
        self._told_entries = False
        self.parities = parities = Parities(arena)
        self.exchange = exchange = ParityExchange(core, parities)
        self.room = room = SlotRoom(core, parity_bytes=parities.nbytes, log_bytes=self._log_bytes)
        self._rebuild = rebuild = Rebuild(core, exchange, parities, room=room)
        lease = LeasePage(config.lease_fd) if config.lease_fd >= 0 else None
        self.persistence = Persistence(core, exchange, rebuild=rebuild.request, lease=lease)
        self.disk = Disk(core, parities)
        self.logs = RecordLogs(core, exchange, admit=room.admit_log)
        self._writing = writing = WriteOperations(
            core,
            room,
            on_sealed=self._on_sealed,
            on_abandoned=exchange.give_up,
            lease=lease,
        )
        reading = ReadOperations(core, parities, rebuild=rebuild)
        self._ops: dict[str, Op] = {
            "adopt": (Adopt, self._adopt),
            "status": (Nothing, self._status),
            "stop": (Nothing, self._stop),
        }
        self._differences = differences = Differences(core, room)
        parts = (writing, reading, differences, exchange, self.persistence, self.disk, self.logs)
        for part in parts:
            self._ops |= part.ops()
        core.listen(self._listeners())
        self._readopt()
        self.server = self._serve(key)
        self.address = self.server.address

    def _listeners(self) -> Listeners:
        """Return the parts that follow a snapshot, in the order in which they hear."""
        exchange, persistence = self.exchange, self.persistence
        return Listeners(
            # Rows are of no use to a successor that does not know the blocks of other nodes.
            commit=(self._store_entries, exchange.committed),
            # The rows are marked first: a restarted sidecar knows the step that others now use.
            protect=(exchange.protected, persistence.protected, self.disk.protected),
            # Readers of the snapshot end first; then its checkpoint may be announced as given up.
            release=(exchange.released, self._rebuild.let_go, persistence.released),
        )

    def _enter(self, world: SnapshotWorld, restore: RestorePoint | None, *, begins: bool) -> None:
        """Have all parts enter a generation; ``begins`` is False for a predecessor's.

        The order matters. The exchange ends the links to the group before: all that the parts
        after it send goes to the new group. The room counts slots while those that are being
        written are still there; writing takes them away last.
        """
        self.exchange.adopted()
        self.room.adopted(world)
        self._rebuild.let_go()
        if begins:  # else the next generation carries the predecessor's checkpoints on
            self.persistence.adopted(world, restore)
        self.logs.adopted(world)
        self._differences.adopted()
        self._writing.adopted()

    def _serve(self, key: RunKey) -> Server:
        config = self.config

        def at(port: str) -> Server:
            bind = f"tcp://{config.host}:{port}"
            return Server(self._handle, key=key, bind=bind, tick=self._tick)

        if config.port:
            try:
                return at(str(config.port))
            except PeerError as error:
                _log.warning("%s: %s; using another port", config.node, error)
        return at("*")

    def _tick(self) -> None:
        self._differences.tick()
        self.core.tick()

    def close(self, *, remove: bool) -> None:
        """Stop serving; ``remove`` the shared memory or leave it for a successor."""
        self._stop_serving()
        if remove:
            self.core.arena.remove()
        else:
            self.core.arena.release()

    def save_newest(self) -> None:
        """Save the newest protected step, as far as the allowed time permits."""
        parts: tuple[LateSave | Disk, ...] = (self.persistence.late, self.disk)
        with self.core.lock:
            waits_s = [part.save_newest() for part in parts]
        began_s = time.monotonic()
        for part, wait_s in zip(parts, waits_s, strict=True):
            while time.monotonic() - began_s < wait_s and not part.has_saved():
                time.sleep(_SAVED_POLL_S)

    def leave(self, *, patience_s: float) -> None:
        """Stop serving; remove the shared memory if requested or if no other process holds it."""
        self._stop_serving()
        if self._removing:
            self.core.arena.remove()
        else:
            self.core.arena.leave(patience_s=patience_s)

    def _stop_serving(self) -> None:
        self.server.close()
        self.persistence.close()
        self.disk.close()
        self.exchange.close()
        self._rebuild.let_go()
        self.logs.close()
        self.core.close()

    def _handle(self, request: Request) -> None:
        if (op := self._ops.get(request.op)) is None:
            raise NotFoundError(f"a sidecar has no operation {request.op!r}; update the caller")
        kind, handler = op
        body = parse(request.body, kind, op=request.op)
        with self.core.lock:
            handler(request, body)

    def _on_sealed(self, entry: BlockEntry, persist: CheckpointTarget | None) -> None:
        if persist is not None:
            self.persistence.want(entry, persist)
        self.exchange.announce(entry)

    def _adopt(self, request: Request, body: Adopt) -> None:
        core = self.core
        before = core.book.generation
        instructions = core.book.adopt(body.world, body.restore)
        if body.world.generation > before:
            self._store_worlds()
            self._enter(body.world, body.restore, begins=True)
        core.apply(instructions)
        request.reply()

    def _log_bytes(self) -> int:
        return self.logs.nbytes()

    def _stop(self, request: Request, body: Nothing) -> None:
        request.reply()
        self._removing = True
        self.stopped.set()

    def _store_worlds(self) -> None:
        """Record the groups of all generations in memory, for a restarted sidecar."""
        book = self.core.book
        worlds = {each.world.generation: each.world for each in book.snapshots.values()}
        if book.world is not None:
            worlds[book.generation] = book.world
        try:
            self._worlds.write(msgspec.json.encode([worlds[number] for number in sorted(worlds)]))
        except OSError as error:
            _log.warning(
                ("%s: snapshots in memory would not survive a crash: %s"), self.core.node, error
            )

    def _store_entries(self, snapshot: Snapshot) -> None:
        """Record the blocks of all ranks of whole snapshots, for a restarted sidecar.

        If all nodes of a group are started again, nobody else knows those of a node that is lost
        after that, and its blocks cannot be rebuilt from the rows.
        """
        book = self.core.book
        whole = [
            each for each in book.snapshots.values() if each.phase is not SnapshotPhase.SEALING
        ]
        entries = [entry for each in whole for entry in each.entries.values()]
        try:
            self._entries.write(msgspec.json.encode(entries))
        except OSError as error:
            if not self._told_entries:
                self._told_entries = True
                _log.warning(
                    "%s: after a crash of all nodes, blocks of another lost node could not be "
                    "rebuilt: %s",
                    self.core.node,
                    error,
                )

    def _readopt(self) -> None:
        """Take over the slots and the generation of an earlier process of this node."""
        core = self.core
        worlds: dict[int, SnapshotWorld] = {}
        if text := self._worlds.read():
            for world in msgspec.json.decode(text, type=list[SnapshotWorld]):
                worlds[world.generation] = world
        for file, entry, state in core.arena.scan():
            if entry.generation not in worlds:
                file.path.unlink(missing_ok=True)
                file.close()
                continue
            core.slots.readopt(file, entry, state)
            committed = state is SlotState.COMMITTED
            core.book.readopt(worlds[entry.generation], entry, committed=committed)
            core.counters["readopted"] += 1
        for row, protected in self.parities.readopt(worlds):
            core.book.readopt_row(worlds[row.generation], row, protected=protected)
            core.counters["rows_readopted"] += 1
        if text := self._entries.read():
            for entry in msgspec.json.decode(text, type=list[BlockEntry]):
                core.book.readopt_known(entry)
        if worlds:
            core.book.world = worlds[max(worlds)]
            self._enter(core.book.world, None, begins=False)

    def _status(self, request: Request, body: Nothing) -> None:
        core = self.core
        slots = core.slots.all()
        status: dict[str, Json] = {
            "run": core.run,
            "node": core.node,
            "generation": core.book.generation,
            "committed": core.book.newest(SnapshotPhase.COMMITTED, generation=core.book.generation),
            "protected": core.book.newest(SnapshotPhase.PROTECTED, generation=core.book.generation),
            "held": core.book.newest(SnapshotPhase.PROTECTED),
            "snapshots": [
                {"generation": key[0], "step": key[1], "phase": each.phase.value}
                for key, each in sorted(core.book.snapshots.items())
            ],
            "slots": {
                state.name.lower(): sum(slot.state is state for slot in slots)
                for state in SlotState
            },
            "bytes": {
                "slots": self.room.slot_bytes(),
                "budget": core.book.world.memory_bytes if core.book.world else 0,
                "parity": self.parities.nbytes(),
                "logs": self.logs.nbytes(),
                "disk": self.disk.nbytes(),
            },
            "machine": machine(core.arena.directory.parent),
            "meters": core.meters.status(),
            **self.room.status(),
            "counters": dict(core.counters),
            "refusals": dict(self.server.refusals + answers_refused()),
            **self.exchange.status(),
            **self.persistence.status(),
            **self.disk.status(),
            **self.logs.status(),
        }
        request.reply(status)
