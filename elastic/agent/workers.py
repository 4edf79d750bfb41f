"""The workers of a node: one process per seat, its channel, its control page, its state."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ckpt.types import Json
from elastic import messages
from elastic.agent.config import AgentConfig
from elastic.channel import WORKER_ENV, WorkerConfig
from elastic.control_page import EVERY_GENERATION, ControlPage
from elastic.process import Child
from elastic.records import JobSpec, Seating, WorkerRecord, WorkerState

_RECEIVE_BYTES = 1 << 18
_STEPS_REMEMBERED = 64


class Worker:
    """One worker process as its agent sees it; ``state`` is what the node's record says."""

    def __init__(self, seating: Seating, *, config: AgentConfig, sidecar: str) -> None:
        self.seat, self.attempt = seating.seat, seating.attempt
        self.incarnation = uuid.uuid4().hex
        self.state = WorkerState.STARTING
        self.ready_after = 0
        self.generation = 0
        self.stepped = 0
        self.spec: JobSpec | None = None
        self.info: dict[str, Json] = {}
        self.result: Json = None
        self.error: str | None = None
        self.verdict: str | None = None
        self.ending = ""
        self.started_s = time.monotonic()
        self.stopped_s: float | None = None
        self.ended_s = 0.0
        self.step_seconds: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self.page = ControlPage.create(f"{config.run}-{self.seat.replace('/', '-')}")
        self._outbox = bytearray()
        self._reader = messages.LineReader()
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        try:
            self.child = self._spawn(theirs, config=config, sidecar=sidecar)
        except OSError:
            self.close()
            raise
        finally:
            theirs.close()

    def _spawn(self, theirs: socket.socket, *, config: AgentConfig, sidecar: str) -> Child:
        told = WorkerConfig(
            channel_fd=theirs.fileno(),
            page_fd=self.page.fd,
            run=config.run,
            node=config.node,
            seat=self.seat,
            attempt=self.attempt,
            incarnation=self.incarnation,
            sidecar=sidecar,
            key_file=config.key_file,
            settings=config.settings,
        )
        env = {"OMP_NUM_THREADS": "1", **os.environ, **config.env}
        env[WORKER_ENV] = msgspec.json.encode(told).decode()
        output = None
        if config.capture_output:
            output = Path(config.run_dir, "logs", f"{self.seat.replace('/', '-')}.log")
        return Child.start(
            config.command,
            env=env,
            tied=True,
            output=output,
            pass_fds=(theirs.fileno(), self.page.fd),
        )

    @property
    def role(self) -> str:
        """The part of the seat before the slash."""
        return self.seat.partition("/")[0]

    @property
    def alive(self) -> bool:
        """Whether the process has not been seen to exit."""
        return self.child.alive

    @property
    def sending(self) -> bool:
        """Whether bytes wait for the worker to read."""
        return bool(self._outbox)

    def recovers_from(self, generation: int) -> bool:
        """Whether it survived ``generation`` and can go on without the lost, but does not yet.

        ``stepped`` is the newest generation in which it completed a step.
        """
        took_part = self.alive and self.spec is not None and self.spec.dp is None
        return took_part and self.generation > 0 and self.stepped <= generation

    def record(self) -> WorkerRecord:
        """Return what the node publishes about it."""
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
        )

    def send(self, message: messages.FromAgent) -> None:
        """Send without blocking; what does not fit follows when the socket is writable."""
        if self.alive:
            self._outbox += messages.encode(message)
            self.flush()
            if len(self._outbox) > messages.MAX_LINE_BYTES:
                self.child.kill()  # it reads nothing: the exit takes the usual path

    def flush(self) -> None:
        """Write what the socket takes now."""
        try:
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()  # it is gone; its exit is reported by the kernel

    def receive(self) -> tuple[list[messages.FromWorker], bool]:
        """Return the messages that have arrived, and whether the worker's end is closed.

        Raises ``ElasticError`` or ``msgspec.DecodeError`` when it does not speak the protocol.
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
        """End a generation for this worker: by the page for pollers, by message for waiters."""
        self.page.set_fence(generation)
        self.send(messages.Fence(generation=generation))

    def stop(self, reason: str) -> None:
        """Ask it to end."""
        self.page.set_fence(EVERY_GENERATION)
        self.send(messages.Stop(reason=reason))

    def close(self) -> None:
        """Release the agent's ends; the process must have ended."""
        self.socket.close()
        self.page.close()


class WorkerTable:
    """The newest worker of each seat on this node, dead ones included until replaced."""

    def __init__(self) -> None:
        self._by_seat: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._by_seat.values()))

    def get(self, seat: str) -> Worker | None:
        """Return the seat's newest worker."""
        return self._by_seat.get(seat)

    def put(self, worker: Worker) -> None:
        """Make it its seat's newest."""
        self._by_seat[worker.seat] = worker

    def drop(self, seat: str) -> None:
        """Forget a dead worker of a seat that moved away."""
        del self._by_seat[seat]

    def living(self) -> list[Worker]:
        """Return those whose process runs."""
        return [worker for worker in self if worker.alive]

    def records(self) -> tuple[WorkerRecord, ...]:
        """Return what the node publishes, by seat."""
        return tuple(self._by_seat[seat].record() for seat in sorted(self._by_seat))

    def kill_all(self) -> None:
        """SIGKILL every worker; callable from any thread."""
        for worker in self:
            worker.child.kill()
