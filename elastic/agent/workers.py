"""The workers of a node: one process per seat, its channel, its control page, its state."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.types import Json
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.stacks import StackProbe
from holdfast.elastic.channel.base import WORKER_ENV, WorkerConfig
from holdfast.elastic.decisions.stragglers import STEPS, RankPace, StepTimes, pace
from holdfast.elastic.events import DataWorkerDeath, DataWorkerHang, RolesAsked, StepDone
from holdfast.elastic.membership import messages
from holdfast.elastic.membership.records import (
    JobSpec,
    RoleAsk,
    Seating,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.preload.client import ForkServer, ServerSpec
from holdfast.elastic.processes import run_dirs
from holdfast.elastic.processes.children import Child
from holdfast.elastic.processes.control_page import EVERY_GENERATION, ControlPage
from holdfast.elastic.processes.freeing import yield_freeing
from holdfast.elastic.processes.lifelock import wait_status

_RECEIVE_BYTES = 1 << 18
_STEPS_REMEMBERED = 64
_SAME_SPEED = 0.1
_PACE_EVERY_S = 2.0
_RETURN_S = 0.2
WORKER_DEFAULTS = {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
"""Defaults of the workers' environment. The second makes torch use huge pages for large tensors if
the kernel gives them on request: new tensors are ready four times sooner after a re-form."""
_REHEARSALS = 2
"""Number of a seat's workers in a row that may die before READY; the next does not rehearse."""


def worker_environment(
    config: AgentConfig, surroundings: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment that all workers of the node have in common.

    ``surroundings`` is that of the agent.
    """
    return {
        **WORKER_DEFAULTS,
        **surroundings,
        **run_dirs.environment(Path(config.run_dir)),
        **config.env,
    }


def server_spec(config: AgentConfig, surroundings: Mapping[str, str] = os.environ) -> ServerSpec:
    """Return the node's workers for a fork server; ``surroundings`` as in `worker_environment`."""
    return ServerSpec(
        command=config.command,
        env=worker_environment(config, surroundings),
        name=f"{config.run}/{config.node}",
        output=config.log_of(f"preload-{config.node}"),
    )


class SeatProcess:
    """One worker process as its agent sees it; ``state`` is its state in the node's record.

    ``stands`` is the place in the user's code where it waits, ``asked_ns`` the time of the beat
    since when it does.

    ``asks`` is its newest ask for other numbers of workers.

    ``unready`` counts the previous workers of the seat in a row that died before they were ready.
    """

    def __init__(
        self,
        seating: Seating,
        *,
        config: AgentConfig,
        sidecar: str,
        before: SeatProcess | None = None,
        server: ForkServer | None = None,
    ) -> None:
        """Start it: forked by ``server``, or by its command where that cannot be done."""
        self.seat, self.attempt = seating.seat, seating.attempt
        self.unready: int = before.unready + 1 if before and before.spec is None else 0
        self.incarnation = uuid.uuid4().hex
        self.state = WorkerState.STARTING
        self.ready_after = 0
        self.generation = self.stepped = 0
        self.halted = self.handed = 0  # generations
        self.stalled = 0
        self.stands = ""
        self.asked_ns = 0
        self.lingers = False
        self.spec: JobSpec | None = None
        self.info: dict[str, Json] = {}
        self.result: Json = None
        self.error: str | None = None
        self.fault = ""
        self.verdict: str | None = None
        self.ending = ""
        self.started_s = time.monotonic()
        self.stopped_s: float | None = None
        self.ended_s = 0.0
        self.asks: RoleAsk | None = None
        self.park_by_s = 0.0
        self.probe: StackProbe | None = None
        self.pace: RankPace | None = None
        self._pace_s = 0.0
        self._times: deque[StepTimes] = deque(maxlen=STEPS)
        self.step_seconds: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self.quiet_seconds: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._mourner: threading.Thread | None = None
        self._page_left = threading.Event()
        self._data_failures: Counter[str] = Counter()
        self.data_trouble = ""
        name = f"{config.run}-{self.seat.replace('/', '-')}"
        self.page = ControlPage.create(name)
        self._stack_fd = os.memfd_create(f"holdfast-stack-{name}", os.MFD_CLOEXEC)
        self._outbox = bytearray()
        self._reader = messages.LineReader()
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        try:
            self.child = self._spawn(theirs, config=config, sidecar=sidecar, server=server)
        except OSError:
            self.close()
            raise
        finally:
            theirs.close()

    def _spawn(
        self,
        theirs: socket.socket,
        *,
        config: AgentConfig,
        sidecar: str,
        server: ForkServer | None,
    ) -> Child:
        fds = (theirs.fileno(), self.page.fd, self._stack_fd)
        output = config.log_of(self.seat.replace("/", "-"))
        if server is not None:
            numbers = tuple(server.first_fd + index for index in range(len(fds)))
            added = self._configuration(numbers, config=config, sidecar=sidecar)
            with contextlib.suppress(PeerError):
                return Child.begun(
                    lambda log: server.fork(env=added, fds=fds, output=log),
                    output=output,
                    stamped=config.stamp_output,
                )
        added = self._configuration(fds, config=config, sidecar=sidecar)
        return Child.start(
            config.command,
            env={**worker_environment(config), **added},
            tied=True,
            output=output,
            copied=True,
            stamped=config.stamp_output,
            pass_fds=fds,
        )

    def _configuration(
        self, fds: tuple[int, ...], *, config: AgentConfig, sidecar: str
    ) -> dict[str, str]:
        """Return the variables of this worker alone; ``fds`` are its numbers of the descriptors."""
        channel_fd, page_fd, stack_fd = fds
        settings = WorkerConfig(
            channel_fd=channel_fd,
            page_fd=page_fd,
            stack_fd=stack_fd,
            run=config.run,
            node=config.node,
            seat=self.seat,
            attempt=self.attempt,
            incarnation=self.incarnation,
            sidecar=sidecar,
            key_file=config.key_file,
            settings=config.settings,
            memory_of=config.memory_of,
            rehearses=self.unready < _REHEARSALS,
            agent=os.getpid(),
            traceback_claims=""
            if config.capture_output
            else f"{config.run_dir}/tracebacks-{config.run}",
        )
        return {WORKER_ENV: msgspec.json.encode(settings).decode()}

    @property
    def role(self) -> str:
        """The part of the seat before the slash."""
        return self.seat.partition("/")[0]

    @property
    def alive(self) -> bool:
        """True if the process has not been seen to exit."""
        return self.child.alive

    @property
    def sending(self) -> bool:
        """True if bytes wait for the worker to read."""
        return bool(self._outbox)

    @property
    def broke(self) -> bool:
        """True if it had completed its part, and then its process ended with an error."""
        return self.state is WorkerState.DONE and bool(self.child.code)

    def recovers_from(self, generation: int) -> bool:
        """Return whether it survived ``generation`` and does not train again yet.

        ``stepped`` is the newest generation in which it completed a step.
        """
        took_part = self.alive and self.spec is not None and self.generation > 0
        return took_part and self.stepped <= generation

    def data_failed(self, event: DataWorkerDeath | DataWorkerHang) -> None:
        """Record, for people, a failure of a process that loads its data."""
        self._data_failures["stuck" if isinstance(event, DataWorkerHang) else "died"] += 1
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(self._data_failures.items()))
        self.data_trouble = (
            f"{self.seat} lost data workers ({counts}), "
            f"the last of loader {event.loader!r}: {event.how}"
        )

    def stepped_in(self, event: StepDone) -> None:
        """Record the durations of a step and of its longest silence from the worker's report."""
        if not event.seconds:
            return
        self.step_seconds.append(event.seconds)
        self.quiet_seconds.append(event.seconds if event.quiet_s is None else event.quiet_s)
        self.stepped = self.generation
        self._times.append(
            StepTimes(
                seconds=event.seconds,
                waited_s=event.waited_s,
                stalled_s=event.stall_s,
                data_s=event.data_s,
                cpu_s=event.cpu_s,
                microbatches=event.microbatches,
            )
        )
        self._note_pace(pace(self._times))

    def asked(self, event: RolesAsked) -> None:
        """Record that it asks, in its present generation, for other numbers of workers."""
        self.asks = RoleAsk(
            generation=self.generation,
            roles=event.roles,
            reason=event.reason,
            waits=event.waits,
            works=event.works,
            step_s=event.step_s,
            expected_s=event.expected_s,
        )

    def _note_pace(self, found: RankPace | None) -> None:
        """Publish a new pace only if it differs, and not too often."""
        if found is None:
            return
        now_s, known = time.monotonic(), self.pace
        same = known and abs(found.speed - known.speed) <= _SAME_SPEED * known.speed
        if not same and now_s - self._pace_s >= _PACE_EVERY_S:
            self.pace, self._pace_s = found, now_s

    def record(self) -> WorkerRecord:
        """Return the worker's part of the node's record."""
        return WorkerRecord(
            seat=self.seat,
            incarnation=self.incarnation,
            pid=self.child.pid,
            state=self.state,
            attempt=self.attempt,
            ready_after=self.ready_after,
            spec=self.spec,
            info=self.info,
            result=self.result,
            ending=self.ending,
            speed=round(self.pace.speed, 4) if self.pace else 0.0,
            waits=round(self.pace.waits, 3) if self.pace else 0.0,
            data=round(self.pace.data, 3) if self.pace else 0.0,
            busy=round(self.pace.busy, 3) if self.pace else 0.0,
            lingers=self.lingers and self.alive and self.state is WorkerState.DONE,
            broke=self.broke,
            fault=self.fault,
            asks=self.asks if self.asks and self.asks.generation == self.generation else None,
        )

    def send(self, message: messages.FromAgent) -> None:
        """Send without blocking; the rest follows when the socket is writable."""
        if self.alive:
            self._outbox += messages.encode(message)
            self.flush()
            if len(self._outbox) > messages.MAX_LINE_BYTES:
                self.child.kill()  # it reads nothing: its exit is handled as usual

    def flush(self) -> None:
        """Write as much as the socket accepts now."""
        try:
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()  # it is gone; its exit is reported by the kernel

    def receive(self) -> tuple[list[messages.FromWorker], bool]:
        """Return the messages that have arrived, and whether the worker's end is closed.

        Raises ``HoldfastError`` or ``msgspec.DecodeError`` if it violates the protocol.
        """
        arrived: list[messages.FromWorker] = []
        try:
            while data := self.socket.recv(_RECEIVE_BYTES):
                arrived += [messages.from_worker.decode(line) for line in self._reader.feed(data)]
        except BlockingIOError:
            return arrived, False
        except OSError:
            return arrived, True
        return arrived, True

    def fence(self, generation: int) -> None:
        """End a generation for this worker: through the page for polls, by a message for waits."""
        self.page.set_fence(generation)
        self.send(messages.Fence(generation=generation))

    def extend(self, until_ns: int) -> None:
        """Let it act until ``until_ns``; callable from any thread."""
        with contextlib.suppress(ValueError):  # it has just ended and its page is closed
            self.page.extend(until_ns)

    def watch_life(self, ended: Callable[[], None]) -> None:
        """Call ``ended``, on a thread of its own, as soon as the process has died.

        Does nothing if a death cannot be detected earlier than by the exit.
        """
        if self._mourner is None and self.page.life_is_held:
            self._mourner = threading.Thread(
                target=self._mourn, args=(ended,), name=f"life of {self.seat}", daemon=True
            )
            self._mourner.start()

    def _mourn(self, ended: Callable[[], None]) -> None:
        died = self.page.await_end()
        self._page_left.set()
        if died and (status := wait_status(self.child.pid)) is not None:
            self.child.foretell(os.waitstatus_to_exitcode(status))
            ended()
            yield_freeing(self.child.pid)
            self.child.bury()

    def ask_stacks(self) -> None:
        """Start to read its stacks."""
        if self.probe is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.probe = StackProbe(self.child.pid, fd=self._stack_fd)

    def stop(self, reason: str) -> None:
        """Request it to end."""
        self.page.set_fence(EVERY_GENERATION)
        self.send(messages.Stop(reason=reason))

    def close(self) -> None:
        """Release the agent's ends; the process must have ended."""
        if self.probe:
            self.probe.close()
        self.socket.close()
        if self._mourner is None or self._page_left.wait(_RETURN_S):
            self.page.close()  # else leak a few bytes on which a thread still waits
        os.close(self._stack_fd)


class WorkerTable:
    """The newest worker of each seat on this node, including dead ones until replaced."""

    def __init__(self) -> None:
        self._by_seat: dict[str, SeatProcess] = {}
        self._until_ns = 0

    def __iter__(self) -> Iterator[SeatProcess]:
        return iter(list(self._by_seat.values()))

    def get(self, seat: str) -> SeatProcess | None:
        """Return the seat's newest worker."""
        return self._by_seat.get(seat)

    def put(self, worker: SeatProcess) -> None:
        """Make ``worker`` the newest of its seat."""
        self._by_seat[worker.seat] = worker
        worker.extend(self._until_ns)

    def drop(self, seat: str) -> None:
        """Forget a dead worker of a seat that moved away."""
        del self._by_seat[seat]

    def living(self) -> list[SeatProcess]:
        """Return the workers whose process runs."""
        return [worker for worker in self if worker.alive]

    def records(self) -> tuple[WorkerRecord, ...]:
        """Return the workers' parts of the node's record, by seat."""
        return tuple(self._by_seat[seat].record() for seat in sorted(self._by_seat))

    def extend(self, until_ns: int) -> None:
        """Let the workers act until ``until_ns`` on the monotonic clock.

        Callable from any thread.
        """
        self._until_ns = until_ns
        for worker in self.living():
            worker.extend(until_ns)

    def kill_all(self) -> None:
        """SIGKILL every worker; callable from any thread."""
        for worker in self:
            worker.child.kill()
