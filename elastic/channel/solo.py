"""The channel of a script that was started by hand: a job of one process.

It starts a sidecar of its own, so that snapshots work as in a larger job. The job has one node, one
seat and one generation at a time. Everything that the channel started ends with it.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import threading
import uuid
from pathlib import Path

from holdfast.ckpt.memory.arena import sweep
from holdfast.ckpt.memory.records import RestorePoint, SidecarPeer, SnapshotWorld
from holdfast.ckpt.transport import RunKey
from holdfast.ckpt.types import Json
from holdfast.elastic.channel.unwatched import Unwatched
from holdfast.elastic.errors import Stopped
from holdfast.elastic.membership.records import (
    TRAINER,
    GenerationRecord,
    JobSpec,
    Member,
    NodeRecord,
    Origin,
    Roster,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning.plan import choose_restore, extend_timeline
from holdfast.elastic.processes.node_sidecar import NodeSidecar, SidecarPlan
from holdfast.elastic.processes.run_dirs import temporary_place

_NODE = "local"


class SoloChannel(Unwatched):
    """Agent, coordinator and world of one rank, in the worker's own process (see `Channel`)."""

    def __init__(self) -> None:
        super().__init__(node=_NODE, seat=f"{TRAINER}/0")
        self.run = f"solo-{uuid.uuid4().hex[:8]}"
        self.incarnation = uuid.uuid4().hex
        self.settings: dict[str, Json] = {}
        self.key = RunKey.new()
        self._closing = threading.Lock()
        sweep()
        with tempfile.TemporaryDirectory(
            prefix="holdfast-solo-", dir=temporary_place()
        ) as directory:
            key_file = Path(directory, "key.json")
            self.key.save(key_file)
            self._sidecar: NodeSidecar | None = NodeSidecar(
                SidecarPlan(run=self.run, node=_NODE, key=self.key, key_file=key_file)
            )
        self.sidecar = self._sidecar.address
        self._spec: JobSpec | None = None
        self._info: dict[str, Json] = {}
        atexit.register(self.close)

    def ready(self, *, after: int, spec: JobSpec | None, info: dict[str, Json]) -> None:
        """Form the first generation, or the next if the worker left one to roll back."""
        self._spec, self._info = spec, info
        going = self._record.number if self._record is not None else 0
        if going > after or self._sidecar is None:
            return
        number = after + 1
        restore = self._fence(self._record, info=info) if self._record is not None else None
        world = SnapshotWorld(
            run=self.run,
            generation=number,
            peers=(SidecarPeer(node=_NODE, address=self.sidecar),),
            rank_nodes=(_NODE,),
            parity=0,
            keep=spec.keep if spec else 1,
            memory_bytes=spec.memory_bytes if spec else 0,
            stage=spec.stage if spec else 0,
        )
        member = Member(rank=0, seat=self.seat, node=_NODE, incarnation=self.incarnation, info=info)
        self._sidecar.client.adopt(world, restore=restore)
        before = self._record.timeline if self._record is not None else ()
        origin = Origin(generation=number, step=restore.step if restore else -1)
        self._record = GenerationRecord(
            number=number,
            members=(member,),
            snapshots=world,
            restore=restore,
            reason="one process, started by hand",
            timeline=extend_timeline(before, origin),
        )

    def _fence(self, record: GenerationRecord, *, info: dict[str, Json]) -> RestorePoint | None:
        """End a generation; return the restore point of the next one."""
        if self._sidecar is None:
            return None
        client = self._sidecar.client
        client.fence(record.number)
        worker = WorkerRecord(
            seat=self.seat,
            incarnation=self.incarnation,
            pid=os.getpid(),
            state=WorkerState.READY,
            ready_after=record.number,
            info=info,
        )
        node = NodeRecord(
            node=_NODE,
            incarnation=self.incarnation,
            domain=_NODE,
            sidecar=self.sidecar,
            slots={TRAINER: 1},
            workers=(worker,),
            fenced=record.number,
            inventory=client.inventory(),
        )
        view = JobView(run=self.run, nodes={_NODE: node}, wanted={TRAINER: 1}, generation=record)
        points, _ = choose_restore(view)
        return points[0] if points else None

    def await_generation(self, *, after: int) -> GenerationRecord:
        """Return the newest generation; there is another only if the worker rolled back."""
        if self._record is None or after >= self._record.number:
            raise Stopped("a run of one process has one generation")
        return self._record

    def fenced(self, generation: int) -> bool:
        """Return False: no other process could take over."""
        return False

    def stopped(self) -> bool:
        """Return whether the channel is closed."""
        return self._sidecar is None

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
