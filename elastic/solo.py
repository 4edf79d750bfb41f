"""A job of one process: what `elastic.channel.connect` gives to a script started by hand.

It starts a sidecar of its own, so that snapshots work as they do in a larger job, and is its only
node, seat and generation. Everything it started ends with it.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import threading
import time
import uuid
from pathlib import Path

from ckpt.arena import sweep
from ckpt.transport import RunKey
from ckpt.types import Json
from ckpt.world import SidecarPeer, SnapshotWorld
from elastic.control_page import Phase
from elastic.errors import Stopped
from elastic.events import EventWriter
from elastic.node_sidecar import NodeSidecar, SidecarPlan
from elastic.records import (
    TRAINER,
    GenerationRecord,
    JobSpec,
    Member,
    NodeRecord,
    Roster,
    WorkerRecord,
    WorkerState,
)

EVENTS_ENV = "HOLDFAST_EVENTS"
"""Where a script started by hand writes its events (JSON lines); nowhere when unset."""

_NODE = "local"
_FIRST = 1


class SoloChannel:
    """Agent, coordinator and world of one, in the worker's own process (see `Channel`)."""

    def __init__(self) -> None:
        self.run, self.node, self.seat = f"solo-{uuid.uuid4().hex[:8]}", _NODE, f"{TRAINER}/0"
        self.incarnation = uuid.uuid4().hex
        self.settings: dict[str, Json] = {}
        self.key = RunKey.new()
        events = os.environ.get(EVENTS_ENV)
        self._events = EventWriter(Path(events), node=_NODE) if events else None
        self._closing = threading.Lock()
        sweep()
        with tempfile.TemporaryDirectory(prefix="holdfast-solo-") as directory:
            key_file = Path(directory, "key.json")
            self.key.save(key_file)
            self._sidecar: NodeSidecar | None = NodeSidecar(
                SidecarPlan(run=self.run, node=_NODE, key=self.key, key_file=key_file)
            )
        self.sidecar = self._sidecar.address
        self._spec: JobSpec | None = None
        self._info: dict[str, Json] = {}
        self._record: GenerationRecord | None = None
        atexit.register(self.close)

    @property
    def role(self) -> str:
        """Always a trainer."""
        return TRAINER

    def ready(self, *, after: int, spec: JobSpec | None, info: dict[str, Json]) -> None:
        """Form the only generation."""
        self._spec, self._info = spec, info
        if self._record is not None or self._sidecar is None:
            return
        world = SnapshotWorld(
            run=self.run,
            generation=_FIRST,
            peers=(SidecarPeer(node=_NODE, address=self.sidecar),),
            rank_nodes=(_NODE,),
            parity=0,
            keep=spec.keep if spec else 1,
            memory_bytes=spec.memory_bytes if spec else 0,
        )
        member = Member(rank=0, seat=self.seat, node=_NODE, incarnation=self.incarnation, info=info)
        self._sidecar.client.adopt(world, restore=None)
        self._record = GenerationRecord(
            number=_FIRST,
            members=(member,),
            snapshots=world,
            restore=None,
            reason="one process, started by hand",
        )

    def await_generation(self, *, after: int) -> GenerationRecord:
        """Return the only generation; there is never another."""
        if self._record is None or after >= _FIRST:
            raise Stopped("a run of one process has one generation")
        return self._record

    def fenced(self, generation: int) -> bool:
        """Never: nobody else could take over."""
        return False

    def stopped(self) -> bool:
        """Only when closed."""
        return self._sidecar is None

    def beat(self, *, step: int, phase: Phase) -> None:
        """Nobody watches."""

    def emit(self, kind: str, **fields: Json) -> None:
        """Write the event where ``HOLDFAST_EVENTS`` says."""
        if self._events:
            self._events.write(kind, source="worker", seat=self.seat, t=time.time(), fields=fields)

    def roster(self) -> Roster:
        """Return the one node and the one generation."""
        worker = WorkerRecord(
            seat=self.seat,
            incarnation=self.incarnation,
            pid=os.getpid(),
            state=WorkerState.ACTIVE if self._record else WorkerState.STARTING,
            spec=self._spec,
            info=self._info,
        )
        node = NodeRecord(
            node=_NODE,
            incarnation=self.incarnation,
            domain=_NODE,
            sidecar=self.sidecar,
            slots={TRAINER: 1},
            workers=(worker,),
        )
        return Roster(nodes=(node,), generation=self._record)

    def roster_version(self) -> int:
        """1 once the generation is formed."""
        return int(self._record is not None)

    def await_roster(self, *, after: int, timeout_s: float) -> int:
        """Return at once when there is something new, else after the time is up."""
        if self.roster_version() <= after:
            time.sleep(timeout_s)
        return self.roster_version()

    def done(self, result: Json = None) -> None:
        """Nobody waits for it: the script goes on."""

    def fail(self, message: str, *, user_error: bool) -> None:
        """Nobody retries: the error reaches the user as it is."""

    def close(self) -> None:
        """Stop the sidecar, which removes its shared memory."""
        with self._closing:
            sidecar, self._sidecar = self._sidecar, None
        if sidecar is None:
            return
        sidecar.stop()
        if self._events:
            self._events.close()
        atexit.unregister(self.close)
