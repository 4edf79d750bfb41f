"""The channel: the interface through which a worker talks to the rest of the job.

`holdfast.elastic.channel.connecting.connect` returns this process's channel: an `AgentChannel` if
an agent started the process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec

from holdfast.ckpt.errors import HoldfastError, InternalError
from holdfast.ckpt.transport import RunKey
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import Stopped
from holdfast.elastic.events import Event, encode
from holdfast.elastic.membership import messages
from holdfast.elastic.membership.phases import WorkerPhase
from holdfast.elastic.membership.records import GenerationRecord, JobSpec, Roster
from holdfast.elastic.processes.control_page import ControlPage

__all__ = [
    "STACK_SIGNAL",
    "WORKER_ENV",
    "AgentChannel",
    "Channel",
    "OvertakenError",
    "WorkerConfig",
    "WorkerPhase",
]

WORKER_ENV = "HOLDFAST_WORKER"
"""Environment variable by which an agent configures a worker (JSON of `WorkerConfig`)."""

STACK_SIGNAL = signal.SIGRTMIN + 11
"""Signal that makes a worker write all its threads' stacks; scripts and schedulers do not use it.
"""

_ORPHANED_STATUS = 113
_RECEIVE_BYTES = 1 << 16


class OvertakenError(InternalError):
    """The job went on to a later stage: the present one is complete."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a worker at its start; with ``stack_fd`` -1 no stacks are written.

    ``memory_of`` is as in `SidecarConfig`; ``rehearses`` allows a rehearsal
    (`holdfast.elastic.loop.rehearsal`). In the folder ``traceback_claims`` one of several workers
    that meet the same error claims its traceback, and prints it; '': each prints its own.
    ``agent`` is the process id of the agent.
    """

    channel_fd: int
    page_fd: int
    stack_fd: int = -1
    run: str
    node: str
    seat: str
    attempt: int
    incarnation: str
    sidecar: str
    key_file: str
    settings: dict[str, Json] = {}
    memory_of: str = ""
    rehearses: bool = True
    traceback_claims: str = ""
    agent: int = 0


class Channel(Protocol):
    """A worker's view of the job. All methods may be called from any thread.

    ``seat`` is ``"<role>/<number>"``; ``sidecar`` is the address of the local sidecar (it can
    change between generations); ``settings`` are the launcher's overrides for the loop;
    ``memory_of`` names this host if it is not the machine, else it is empty.
    """

    run: str
    node: str
    seat: str
    incarnation: str
    sidecar: str
    key: RunKey
    settings: dict[str, Json]
    memory_of: str

    @property
    def role(self) -> str:
        """The seat's role: ``"trainer"``, or another role of the job."""

    def ready(self, *, after: int, spec: JobSpec | None, info: dict[str, Json]) -> None:
        """Report that this worker is parked and can join any generation newer than ``after``.

        Roles other than trainers call it once, with ``after=0``, to publish ``info``.
        """

    def await_generation(self, *, after: int) -> GenerationRecord:
        """Block until a generation newer than ``after`` contains this worker, and return it.

        Of several, the newest is returned. Raises ``Stopped`` when the job ends, `OvertakenError`
        if it went on to a later stage.
        """

    def fenced(self, generation: int) -> bool:
        """Return whether ``generation`` is over (or the job is); two reads of shared memory.

        It is also over if the agent did not renew the node's lease in time.
        """

    def stopped(self) -> bool:
        """Return whether the job is over for this worker."""

    def leaving(self) -> bool:
        """Return whether this node must leave; one read of shared memory.

        Trainers see this when it is their turn, and leave after the present step. Other roles see
        it at once, and have about two seconds to hand over data that would be lost.
        """

    def halts(self, generation: int) -> bool:
        """Return whether the trainers of ``generation`` must halt at the end of the present step.

        Others join then, and no step is repeated. One read of shared memory.
        """

    def halted(self, *, generation: int, step: int) -> None:
        """Report that this trainer has halted at the end of ``step``, as every other does."""

    def handed_over(self, *, generation: int, step: int) -> None:
        """Report that ``step`` is safe without this worker, whose node may leave now."""

    def beat(self, *, step: int, phase: WorkerPhase, limit_s: float = 0.0) -> None:
        """Show progress; one write to shared memory. Silence in COMPUTE counts as a hang.

        ``limit_s``: the longest silence allowed now; 0: the agent's own limit.
        """

    def emit(self, event: Event) -> None:
        """Record an event of this worker in the node's event file."""

    def roster(self) -> Roster:
        """Return the whole job as last received: nodes (without inventories) and generation."""

    def roster_version(self) -> int:
        """Return a number that grows whenever the roster changes."""

    def await_roster(self, *, after: int, timeout_s: float) -> int:
        """Block until the roster's version is beyond ``after`` or the time is up; return it.

        Raises ``Stopped`` when the job ends.
        """

    def done(self, result: Json = None, *, lingers: bool = False) -> None:
        """Report that this worker's part is complete; the job ends when every rank has.

        ``lingers``: another stage may follow, so the job goes on until the process ends.
        """

    def fail(self, message: str, *, user_error: bool, fault: str = "") -> None:
        """Report why this worker ends: a ``user_error`` ends the job, other errors are retried.

        ``fault`` is the kind and line of an error that a retry meets again; if all ranks have the
        same, the job ends.
        """

    def close(self) -> None:
        """Release the channel's resources; the process may continue without it."""


class AgentChannel:
    """The channel to this node's agent: a socket for messages, a shared page for the rest.

    If the agent is gone, the process ends at once, because a worker without an agent cannot be
    fenced.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.run, self.node, self.seat = config.run, config.node, config.seat
        self.incarnation, self.sidecar = config.incarnation, config.sidecar
        self.key = RunKey.load(Path(config.key_file))
        self.settings, self.memory_of = config.settings, config.memory_of
        self.rehearses = config.rehearses
        self._page = ControlPage(config.page_fd)
        self._page.hold_life()
        self._socket = socket.socket(fileno=config.channel_fd)
        fds = [config.page_fd, config.channel_fd]
        if config.stack_fd >= 0:
            fds.append(config.stack_fd)
            faulthandler.register(STACK_SIGNAL, file=config.stack_fd, all_threads=True)
        for fd in fds:
            os.set_inheritable(fd, False)  # a grandchild must not hold the lifeline open
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._record: GenerationRecord | None = None
        self._roster, self._roster_version = Roster(), 0
        self._stop_reason: str | None = None
        self._spec: JobSpec | None = None
        threading.Thread(target=self._listen, name="agent-channel", daemon=True).start()

    @property
    def role(self) -> str:
        """The part of the seat before the slash."""
        return self.seat.partition("/")[0]

    def ready(self, *, after: int, spec: JobSpec | None, info: dict[str, Json]) -> None:
        """See `Channel.ready`."""
        self._spec = spec
        self._send(messages.Ready(after=after, spec=spec, info=info))

    def await_generation(self, *, after: int) -> GenerationRecord:
        """See `Channel.await_generation`."""
        with self._changed:
            while True:
                self._check_stopped()
                record = self._record
                if record is not None and record.number > after:
                    return record
                if self._spec is not None and self._roster.in_stages_after(self._spec.stage):
                    raise OvertakenError
                self._changed.wait()

    def fenced(self, generation: int) -> bool:
        """See `Channel.fenced`."""
        page = self._page
        return page.fence >= generation or page.expired

    def stopped(self) -> bool:
        """See `Channel.stopped`."""
        return self._stop_reason is not None

    def leaving(self) -> bool:
        """See `Channel.leaving`."""
        return self._page.leaving

    def halts(self, generation: int) -> bool:
        """See `Channel.halts`."""
        return self._page.halts(generation)

    def halted(self, *, generation: int, step: int) -> None:
        """See `Channel.halted`."""
        self._send(messages.Halted(generation=generation, step=step))

    def handed_over(self, *, generation: int, step: int) -> None:
        """See `Channel.handed_over`."""
        self._send(messages.HandedOver(generation=generation, step=step))

    def beat(self, *, step: int, phase: WorkerPhase, limit_s: float = 0.0) -> None:
        """See `Channel.beat`."""
        self._page.beat(step=step, phase=phase, limit_s=limit_s)

    def emit(self, event: Event) -> None:
        """See `Channel.emit`."""
        timed = msgspec.structs.replace(event, time_s=time.time())
        self._send(messages.Emit(event=msgspec.Raw(encode(timed))))

    def roster(self) -> Roster:
        """See `Channel.roster`."""
        with self._changed:
            return self._roster

    def roster_version(self) -> int:
        """See `Channel.roster_version`."""
        with self._changed:
            return self._roster_version

    def await_roster(self, *, after: int, timeout_s: float) -> int:
        """See `Channel.await_roster`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._roster_version > after or self._stop_reason is not None, timeout_s
            )
            self._check_stopped()
            return self._roster_version

    def done(self, result: Json = None, *, lingers: bool = False) -> None:
        """See `Channel.done`."""
        self._send(messages.Done(result=result, lingers=lingers))

    def fail(self, message: str, *, user_error: bool, fault: str = "") -> None:
        """See `Channel.fail`."""
        self._send(messages.Fail(message=message, user_error=user_error, fault=fault))

    def close(self) -> None:
        """See `Channel.close`: the socket stays open, since its end is the worker's lifeline."""

    def _check_stopped(self) -> None:
        if self._stop_reason is not None:
            raise Stopped(self._stop_reason)

    def _send(self, message: messages.FromWorker) -> None:
        line = messages.encode(message)
        if len(line) > messages.MAX_LINE_BYTES:
            raise HoldfastError(
                f"a message of {len(line)} bytes to the agent exceeds {messages.MAX_LINE_BYTES}: "
                "announce or emit less"
            )
        with self._send_lock:
            try:
                self._socket.sendall(line)
            except OSError:
                os._exit(_ORPHANED_STATUS)

    def _listen(self) -> None:
        reader = messages.LineReader()
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except OSError:
                data = b""
            if not data:
                os._exit(_ORPHANED_STATUS)
            for line in reader.feed(data):
                self._receive(messages.from_agent.decode(line))

    def _receive(self, message: messages.FromAgent) -> None:
        with self._changed:
            match message:
                case messages.Begin(record=record):
                    self._record = record
                    self._move_sidecar({p.node: p.address for p in record.snapshots.peers})
                case messages.RosterChanged(roster=roster):
                    self._roster, self._roster_version = roster, self._roster_version + 1
                    self._move_sidecar({n.node: n.sidecar for n in roster.nodes})
                case messages.Stop(reason=reason):
                    self._stop_reason = reason
                case messages.Fence():
                    pass  # the control page has it already; this wakes waiting threads
            self._changed.notify_all()

    def _move_sidecar(self, addresses: dict[str, Any]) -> None:
        self.sidecar = addresses.get(self.node) or self.sidecar
