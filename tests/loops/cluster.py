"""Small jobs of real ranks on one node, for many loops one after the other in few seconds.

A job has a sidecar, ranks that are forked from a server with everything imported, and a hub (the
test's process) that acts as agent and coordinator: it forms generations, sees a rank die, fences,
replaces it and chooses the restore point. All else is the product's own: the decorated function,
groups, snapshots, restore, checkpoints.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing as mp
import os
import runpy
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast.ckpt.memory.records import SidecarPeer, SnapshotWorld
from holdfast.ckpt.transport import RunKey
from holdfast.ckpt.types import Json
from holdfast.elastic.channel.base import WorkerPhase
from holdfast.elastic.channel.unwatched import Unwatched
from holdfast.elastic.errors import Stopped
from holdfast.elastic.events import Event
from holdfast.elastic.loop import generations
from holdfast.elastic.loop.stages import Stages
from holdfast.elastic.loop.trace.records import TRACE_ENV, TraceSettings
from holdfast.elastic.membership.records import (
    TRAINER,
    GenerationRecord,
    JobSpec,
    Member,
    MeshSize,
    NodeRecord,
    Origin,
    Roster,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning.plan import choose_restore, extend_timeline
from holdfast.elastic.processes.node_sidecar import NodeSidecar, SidecarPlan

NODE = "n0"
DEADLINE_S = 100.0
_POLL_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A SIGKILL at the ``beat``-th sign of life in step ``step``, hence at the same line each time.

    With ``everyone`` all ranks die there, as soon as a checkpoint is complete, and the job ends.
    """

    step: int
    beat: int
    rank: int = 1
    everyone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The part of one rank in a job: ``module.name`` is the decorated function to call.

    With ``script`` it is a path to run instead. With ``trace`` the run records itself, and its
    ranks die as ordered there.
    """

    module: str
    name: str
    folder: str
    every: int
    kill: Kill | None
    incarnation: str
    sidecar: str
    key: RunKey
    run: str
    script: str = ""
    trace: TraceSettings | None = None


@dataclass(slots=True)
class Outcome:
    """The end of a job: its events in the order in which they were told, or the error's text."""

    events: list[Event] = field(default_factory=list)
    error: str = ""

    def of(self, kind: str) -> list[Any]:
        """Return the events of one kind."""
        return [event for event in self.events if event.kind == kind]

    @property
    def losses(self) -> list[float]:
        """The logged losses in the order of the steps, stage after stage."""
        return [event.values["loss"] for event in self.of("metric")]

    @property
    def restored(self) -> list[str]:
        """The tiers from which rank 0 was restored, generation after generation."""
        return [event.tier for event in self.of("restored") if event.rank == 0]


class RankChannel(Unwatched):
    """A rank's `Channel` to the hub: a pipe for messages, a file whose presence is the fence."""

    def __init__(self, task: Task, pipe: Connection) -> None:
        super().__init__(node=NODE, seat=f"{TRAINER}/{task.incarnation}")
        self.run, self.sidecar, self.incarnation = task.run, task.sidecar, task.incarnation
        self.key = task.key
        root = str(Path(task.folder, "runs", "{stage}"))  # not below where the loop was imported
        self.settings: dict[str, Json] = {"checkpoint": {"every": task.every, "root": root}}
        self._task, self._pipe = task, pipe
        self._record: GenerationRecord | None = None
        self._beats = 0

    @property
    def role(self) -> str:
        """Always a trainer."""
        return TRAINER

    def ready(self, *, after: int, spec: JobSpec | None, info: dict[str, Json]) -> None:
        """See `Channel.ready`."""
        if not after:
            self._record = None  # of the stage before
        self._pipe.send(("ready", spec, info))

    def await_generation(self, *, after: int) -> GenerationRecord:
        """See `Channel.await_generation`."""
        while self._record is None or self._record.number <= after:
            found = self._pipe.recv()
            if found is None:
                raise Stopped("the job is over")
            self._record = msgspec.msgpack.decode(found, type=GenerationRecord)
        return self._record

    def fenced(self, generation: int) -> bool:
        """See `Channel.fenced`."""
        return fence_of(Path(self._task.folder), generation).exists()

    def stopped(self) -> bool:
        """Return False: the hub ends the process."""
        return False

    def roster(self) -> Roster:
        """Return the present generation alone."""
        return Roster(generation=self._record)

    def beat(self, *, step: int, phase: WorkerPhase, limit_s: float = 0.0) -> None:
        """Die if it is time to: this is called at the same places in every run of a loop."""
        kill, record = self._task.kill, self._record
        if kill is None or record is None or record.number > 1:
            return
        if step != kill.step or phase is not WorkerPhase.COMPUTE:
            return
        self._beats += 1
        if self._beats != kill.beat:
            return
        rank = next(m.rank for m in record.members if m.incarnation == self.incarnation)
        if kill.everyone:
            self._await_checkpoint()
        elif rank != kill.rank:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def _await_checkpoint(self) -> None:
        folder, end_s = Path(self._task.folder), time.monotonic() + DEADLINE_S
        while not list(folder.glob("runs/**/step-*/manifest.json")):
            assert time.monotonic() < end_s, "no checkpoint was written"
            time.sleep(_POLL_S)

    def emit(self, event: Event) -> None:
        """See `Channel.emit`."""
        self._pipe.send(("event", event))

    def done(self, result: Json = None, *, lingers: bool = False) -> None:
        """See `Channel.done`."""

    def fail(self, message: str, *, user_error: bool, fault: str = "") -> None:
        """Do nothing: the error itself is told."""

    def close(self) -> None:
        """Do nothing: the process serves other jobs."""


def state_of(folder: Path) -> dict[str, str]:
    """Return the tracked state of every stage's newest checkpoint, each tensor by its checksum.

    They are below ``runs`` in the folder in which a loop of the library runs.
    """
    state: dict[str, str] = {}
    for root in sorted({path.parent for path in (folder / "runs").rglob("step-*")}):
        with holdfast.open(root) as saved:
            found = {name: holdfast.state_hash({"value": saved[name][...]}) for name in saved}
            found |= {n: json.dumps(value, sort_keys=True) for n, value in saved.values.items()}
        state |= {f"{root.name}: {name}": value for name, value in found.items()}
    assert state, "no checkpoint was written"
    return state


def fence_of(folder: Path, generation: int) -> Path:
    """Return the file whose presence ends a generation."""
    return folder / f"fence-{generation}"


def serve(pipe: Connection) -> None:
    """Run the parts that the hub sends, one after the other; the main function of a rank."""
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        channel: Any = RankChannel(task, pipe)
        generations.connect = lambda channel=channel: channel
        generations._stages = Stages()
        os.chdir(task.folder)
        os.environ.pop(TRACE_ENV, None)
        if task.trace is not None:
            os.environ[TRACE_ENV] = msgspec.json.encode(task.trace).decode()
        try:
            if task.script:
                runpy.run_path(task.script, run_name="__main__")
            else:
                getattr(importlib.import_module(task.module), task.name)()
        except Stopped:
            pipe.send(("end", ""))
        except BaseException as error:  # noqa: BLE001 - told to the test
            trace = "" if isinstance(error, generations.USER_ERRORS) else traceback.format_exc()
            pipe.send(("end", f"{type(error).__name__}: {error}\n{trace}".strip()))
        else:
            pipe.send(("end", ""))
    os._exit(0)


class Rank:
    """A rank process and the hub's end of its pipe."""

    def __init__(self, context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        """End it, if it lives."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Cluster:
    """The processes for jobs; ranks that survive a job serve in the next one."""

    def __init__(self, preload: list[str]) -> None:
        self._context = mp.get_context("forkserver")
        self._idle: list[Rank] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # of the preload
            self._context.set_forkserver_preload([__name__, *preload])
            forkserver.ensure_running()

    def rank(self) -> Rank:
        """Return a rank without work."""
        return self._idle.pop() if self._idle else Rank(self._context)

    def run(
        self,
        module: str,
        folder: Path,
        *,
        size: int,
        name: str = "port",
        every: int = 100,
        kill: Kill | None = None,
        script: str = "",
        trace: TraceSettings | None = None,
    ) -> Outcome:
        """Run ``module.name`` on so many ranks and return its outcome."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("fence-*"):
            old.unlink()
        run, key = f"loops-{uuid.uuid4().hex[:8]}", RunKey.new()
        key_file = folder / f"{run}.json"
        key.save(key_file)
        sidecar = NodeSidecar(SidecarPlan(run=run, node=NODE, key=key, key_file=key_file))
        task = Task(
            module=module,
            name=name,
            folder=str(folder),
            every=every,
            kill=kill,
            incarnation="",
            sidecar=sidecar.address,
            key=key,
            run=run,
            script=script,
            trace=trace,
        )
        job = _Job(self, sidecar, task, size=size)
        try:
            return job.run()
        finally:
            self._idle += job.leave()
            sidecar.stop()

    def close(self) -> None:
        """End every process; later jobs have new ones."""
        while self._idle:
            self._idle.pop().kill()


@contextmanager
def cluster(*preload: str) -> Iterator[Cluster]:
    """Return a cluster whose ranks have these modules imported."""
    found = Cluster(list(preload))
    try:
        yield found
    finally:
        found.close()


class _Job:
    """The hub of one job: agent and coordinator of its ranks."""

    def __init__(self, owner: Cluster, sidecar: NodeSidecar, task: Task, *, size: int) -> None:
        self._cluster, self._sidecar, self._task = owner, sidecar, task
        self._ranks: dict[str, Rank] = {}
        self._infos: dict[str, Mapping[str, Json]] = {}
        self._ended: set[str] = set()
        self._record: GenerationRecord | None = None
        self._outcome = Outcome()
        self._count, self._spec = 0, JobSpec()
        for _ in range(size):
            self._start()

    def _start(self) -> None:
        incarnation = str(self._count)
        self._count += 1
        rank = self._ranks[incarnation] = self._cluster.rank()
        rank.pipe.send(replace(self._task, incarnation=incarnation))

    def run(self) -> Outcome:
        """Return the outcome once every rank has ended."""
        end_s = time.monotonic() + DEADLINE_S
        while self._ranks.keys() - self._ended:
            waiting = {r.pipe: i for i, r in self._ranks.items() if i not in self._ended}
            found = wait(list(waiting), timeout=max(end_s - time.monotonic(), 0.0))
            assert found, f"{self._task.module}: not over after {DEADLINE_S:g} s"
            for incarnation in [waiting[pipe] for pipe in found]:  # type: ignore[index]
                if incarnation in self._ranks:  # else it died with another
                    self._hear(incarnation)
            if self._outcome.error:
                break
        return self._outcome

    def _hear(self, incarnation: str) -> None:
        try:
            kind, *said = self._ranks[incarnation].pipe.recv()
        except (EOFError, ConnectionError):
            self._lose(incarnation)
            return
        if kind == "event":
            self._outcome.events.append(said[0])
        elif kind == "end":
            self._ended.add(incarnation)
            self._outcome.error = self._outcome.error or said[0]
        elif kind == "ready":
            self._spec, self._infos[incarnation] = said
            if self._infos.keys() == self._ranks.keys():
                self._form()

    def _lose(self, incarnation: str) -> None:
        """Fence the generation of a rank that died, and start its replacement.

        A rank that is ready already waits for the next generation, and does not say so again.
        """
        self._ranks.pop(incarnation).kill()
        self._infos.pop(incarnation, None)
        kill, trace = self._task.kill, self._task.trace
        ordered = kill is not None or (trace is not None and trace.deaths)
        assert ordered, f"{self._task.module}: a rank died by itself"
        assert self._record is not None
        fence_of(Path(self._task.folder), self._record.number).touch()
        if kill is None or not kill.everyone:
            self._start()
            return
        for rank in self._ranks.values():
            rank.kill()
        self._ranks.clear()

    def _form(self) -> None:
        """Form the next generation of all ranks."""
        number = self._record.number + 1 if self._record else 1
        points = self._fence(self._record) if self._record else []
        restore = points[0] if points else None
        size = len(self._ranks)
        world = SnapshotWorld(
            run=self._task.run,
            generation=number,
            peers=(SidecarPeer(node=NODE, address=self._sidecar.address),),
            rank_nodes=(NODE,) * size,
            parity=0,
            keep=2,
            stage=self._spec.stage,
        )
        self._sidecar.client.adopt(world, restore=restore)
        members = tuple(
            Member(rank=i, seat=f"{TRAINER}/{each}", node=NODE, incarnation=each, info=dict(info))
            for i, (each, info) in enumerate(sorted(self._infos.items(), key=lambda x: int(x[0])))
        )
        before = self._record.timeline if self._record else ()
        origin = Origin(generation=number, step=restore.step if restore else -1)
        self._record = GenerationRecord(
            number=number,
            members=members,
            snapshots=world,
            restore=restore,
            fallbacks=tuple(points[1:]),
            reason="test",
            mesh=MeshSize(dp=size),
            timeline=extend_timeline(before, origin),
        )
        self._infos.clear()
        for rank in self._ranks.values():
            rank.pipe.send(msgspec.msgpack.encode(self._record))

    def _fence(self, record: GenerationRecord) -> list[Any]:
        """Close the sidecar's books on a generation; return its restore points, newest first."""
        client = self._sidecar.client
        client.fence(record.number)
        workers = tuple(
            WorkerRecord(
                seat=f"{TRAINER}/{each}",
                incarnation=each,
                pid=rank.process.pid or 0,
                state=WorkerState.READY,
                ready_after=record.number,
                spec=self._spec,
                info=dict(self._infos[each]),
            )
            for each, rank in self._ranks.items()
        )
        node = NodeRecord(
            node=NODE,
            incarnation=NODE,
            domain=NODE,
            sidecar=self._sidecar.address,
            slots={TRAINER: len(workers)},
            workers=workers,
            fenced=record.number,
            inventory=client.inventory(),
        )
        view = JobView(
            run=self._task.run,
            nodes={NODE: node},
            wanted={TRAINER: len(workers)},
            generation=record,
        )
        return choose_restore(view)[0]

    def leave(self) -> list[Rank]:
        """Return the ranks that can serve again; end the others."""
        if self._ranks.keys() <= self._ended:
            return list(self._ranks.values())
        for rank in self._ranks.values():
            rank.kill()
        return []
