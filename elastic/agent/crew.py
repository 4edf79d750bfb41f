"""Running a node's workers: started by the seating, watched, fenced, and ended when they fail."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence

import msgspec

from elastic import messages
from elastic.agent.config import AgentConfig
from elastic.agent.reporting import Reporter
from elastic.agent.workers import Worker, WorkerTable
from elastic.control_page import Phase
from elastic.detect import silence_limit_s
from elastic.errors import ElasticError
from elastic.membership import role_of
from elastic.process import Change, ChildStatus, describe_exit
from elastic.records import TRAINER, GenerationRecord, Roster, Seating, WorkerState


class Crew:
    """The workers of one node."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        selector: selectors.BaseSelector,
        reporter: Reporter,
        job_failed: Callable[[str], None],
    ) -> None:
        self._config, self._selector = config, selector
        self._reporter, self._job_failed = reporter, job_failed
        self._timing = config.timing
        self._park_deadline_s: float | None = None
        self._roster = Roster()
        self.table = WorkerTable()
        self.failures: list[str] = []

    @property
    def suspicious(self) -> bool:
        """Whether a worker is stopped, and will be ended unless it continues soon."""
        return any(worker.stopped_s is not None for worker in self.table.living())

    # -- by order of the seating -------------------------------------------------------------

    def follow(self, seats: Sequence[Seating], *, sidecar: str) -> None:
        """Start who is seated here and not running, end who is no longer seated here."""
        orders = {order.seat: order for order in seats}
        for worker in self.table:
            if worker.seat not in orders:
                worker.child.kill()
                if not worker.alive:
                    self.table.drop(worker.seat)
        for order in seats:
            known = self.table.get(order.seat)
            due = known is None or (not known.alive and order.attempt > known.attempt)
            if due and not self._yields(known):
                self._start(order, sidecar=sidecar)

    def _yields(self, lost: Worker | None) -> bool:
        """Whether a replacement waits a little: its start takes seconds of processor time.

        The survivors on this node get that first, until they train again.
        """
        if lost is None or lost.generation == 0:
            return False
        if time.monotonic() - lost.ended_s > self._timing.yield_s:
            return False
        recovering = [w for w in self.table.living() if w.recovers_from(lost.generation)]
        return any(w.spec and w.spec.least <= self._trainers_left() for w in recovering)

    def _trainers_left(self) -> int:
        """Return how many trainers of the whole job take part or could at once."""
        going = (WorkerState.READY, WorkerState.ACTIVE)
        workers = [worker for node in self._roster.nodes for worker in node.workers]
        return sum(role_of(w.seat) == TRAINER and w.state in going for w in workers)

    def _start(self, order: Seating, *, sidecar: str) -> None:
        try:
            worker = Worker(order, config=self._config, sidecar=sidecar)
        except OSError as error:
            command = " ".join(self._config.command)
            self._job_failed(f"{order.seat} cannot be started ({command}): {error}")
            return
        self.table.put(worker)
        self._listen(worker, selectors.EVENT_READ)
        worker.send(messages.RosterChanged(roster=self._roster))
        self._reporter.emit(
            "worker_started", seat=worker.seat, pid=worker.child.pid, attempt=worker.attempt
        )

    # -- what workers say --------------------------------------------------------------------

    def _listen(self, worker: Worker, events: int) -> None:
        self._selector.register(worker.socket, events, lambda mask: self._on_socket(worker, mask))

    def _on_socket(self, worker: Worker, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            worker.flush()
        if mask & selectors.EVENT_READ:
            self._receive(worker)
        self._adjust(worker)

    def _adjust(self, worker: Worker) -> None:
        """Ask to be told of room to write exactly while something waits to be written."""
        if worker.socket.fileno() >= 0 and worker.socket in self._selector.get_map():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.sending else 0)
            key = self._selector.get_key(worker.socket)
            if key.events != events:
                self._selector.modify(worker.socket, events, key.data)

    def _receive(self, worker: Worker) -> None:
        try:
            arrived, closed = worker.receive()
        except (ElasticError, msgspec.MsgspecError) as error:
            worker.error = f"it does not speak the worker protocol: {error}"
            worker.child.kill()
            self._selector.unregister(worker.socket)
            return
        for message in arrived:
            self._handle(worker, message)
        if closed:
            self._selector.unregister(worker.socket)

    def _handle(self, worker: Worker, message: messages.FromWorker) -> None:
        match message:
            case messages.Ready():
                self._on_ready(worker, message)
            case messages.Emit():
                self._on_emit(worker, message)
            case messages.Done():
                worker.state, worker.result = WorkerState.DONE, message.result
            case messages.Fail():
                worker.error = message.message
                if message.user_error:
                    self._job_failed(message.message)

    def _on_ready(self, worker: Worker, message: messages.Ready) -> None:
        if message.after < worker.generation or worker.state is WorkerState.DONE:
            return  # said before it was told of the generation it is in now
        worker.state, worker.ready_after = WorkerState.READY, message.after
        worker.spec, worker.info = message.spec, message.info
        joins = self._roster.generation is not None and message.after == 0
        if joins and worker.role == TRAINER:
            self._reporter.emit("detected", what="join", victim=worker.seat)

    def _on_emit(self, worker: Worker, message: messages.Emit) -> None:
        seconds = message.fields.get("seconds")
        if message.kind == "step" and isinstance(seconds, int | float):
            worker.step_seconds.append(float(seconds))
            worker.stepped = worker.generation
        self._reporter.relay(worker.seat, message)

    # -- what the kernel and the clock say ------------------------------------------------------

    def check(self) -> None:
        """Notice exits, stops and hangs; end what has to be ended."""
        now_s = time.monotonic()
        for worker in self.table.living():
            while status := worker.child.poll():
                self._on_status(worker, status, now_s=now_s)
            if worker.alive:
                self._judge(worker, now_s=now_s)

    def _on_status(self, worker: Worker, status: ChildStatus, *, now_s: float) -> None:
        match status.change:
            case Change.EXITED:
                self._on_exit(worker, status.code)
            case Change.STOPPED:
                worker.stopped_s = now_s
            case Change.CONTINUED:
                worker.stopped_s = None

    def _judge(self, worker: Worker, *, now_s: float) -> None:
        stopped_s = worker.stopped_s
        if stopped_s is not None and now_s - stopped_s > self._timing.stop_grace_s:
            self._put_down(worker, what="stopped", why=f"stopped for {now_s - stopped_s:.2f} s")
        elif worker.state is WorkerState.ACTIVE and (silent := self._hung(worker)):
            self._put_down(worker, what="hang", why=f"no progress for {silent:.1f} s")

    def _hung(self, worker: Worker) -> float | None:
        beat = worker.page.last_beat()
        if beat.phase != Phase.COMPUTE:
            return None
        silent_s = (time.monotonic_ns() - beat.at_ns) / 1e9
        limit_s = silence_limit_s(worker.step_seconds, min_hang_s=self._timing.min_hang_s)
        return silent_s if silent_s > limit_s else None

    def _put_down(self, worker: Worker, *, what: str, why: str) -> None:
        """SIGKILL a worker that would never end by itself; its exit is noticed like any other."""
        if worker.verdict is None:
            worker.verdict = why
            self._reporter.emit("detected", what=what, victim=worker.seat, why=why)
            worker.child.kill()

    def _on_exit(self, worker: Worker, code: int) -> None:
        if worker.socket in self._selector.get_map():
            self._receive(worker)  # its last words
        if worker.socket in self._selector.get_map():
            self._selector.unregister(worker.socket)
        worker.ending, worker.ended_s = self._describe(worker, code), time.monotonic()
        completed = worker.state is WorkerState.DONE
        if not completed and code == 0 and worker.role != TRAINER:
            worker.state, completed = WorkerState.DONE, True
        if not completed:
            if code == 0 and worker.state is WorkerState.STARTING:
                self._never_trained(worker)
            worker.state = WorkerState.DEAD
            if worker.verdict is None:
                self._reporter.emit("detected", what="exit", victim=worker.seat, why=worker.ending)
        elif code != 0:
            self.failures.append(
                f"{worker.seat} completed its part of the job and then ended with {worker.ending}"
            )
        self._reporter.emit(
            "worker_exited",
            seat=worker.seat,
            pid=worker.child.pid,
            status=worker.ending,
        )
        worker.close()

    def _never_trained(self, worker: Worker) -> None:
        """End a job whose script does nothing for it; a later start may differ, so not then."""
        if self._roster.generation is None:
            command = " ".join(self._config.command)
            self._job_failed(
                f"{worker.seat} ended without training ({command}): have the script call a "
                "function decorated with @elastic.resilient"
            )

    def _describe(self, worker: Worker, code: int) -> str:
        ending = describe_exit(code)
        if code == 0 and worker.state is not WorkerState.DONE:
            ending = "exit status 0 before its part of the job was complete"
        return f"{ending}: {detail}" if (detail := worker.verdict or worker.error) else ending

    # -- generations ------------------------------------------------------------------------

    def begin(self, record: GenerationRecord) -> None:
        """Send a generation to its members on this node that are ready for it."""
        incarnations = {member.incarnation for member in record.members}
        for worker in self.table.living():
            if worker.incarnation in incarnations and worker.state is WorkerState.READY:
                worker.state, worker.generation = WorkerState.ACTIVE, record.number
                self._send(worker, messages.Begin(record=record))

    def fence(self, generation: int) -> None:
        """Have every worker leave ``generation`` and older; `parked` says when it is so."""
        self._park_deadline_s = time.monotonic() + self._timing.park_timeout_s
        for worker in self._inside(generation):
            worker.fence(generation)
            self._adjust(worker)

    def parked(self, generation: int) -> bool:
        """Whether no worker acts in ``generation`` any more; ends those that take too long."""
        inside = self._inside(generation)
        if inside and self._park_deadline_s and time.monotonic() > self._park_deadline_s:
            waited_s = self._timing.park_timeout_s
            for worker in inside:
                self._put_down(worker, what="hang", why=f"did not leave within {waited_s:g} s")
        return not inside

    def _inside(self, generation: int) -> list[Worker]:
        return [
            worker
            for worker in self.table.living()
            if worker.state is WorkerState.ACTIVE and worker.generation <= generation
        ]

    def tell(self, roster: Roster) -> None:
        """Send the roster to every worker when it has changed."""
        if roster != self._roster:
            self._roster = roster
            for worker in self.table.living():
                self._send(worker, messages.RosterChanged(roster=roster))

    def _send(self, worker: Worker, message: messages.FromAgent) -> None:
        worker.send(message)
        self._adjust(worker)

    # -- the end ----------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Ask every worker to end."""
        for worker in self.table.living():
            worker.stop(reason)
            self._adjust(worker)

    def end_late(self, waited_s: float, *, grace_s: Callable[[Worker], float]) -> bool:
        """SIGKILL those whose grace is over; whether all have ended."""
        living = self.table.living()
        for worker in living:
            if waited_s > grace_s(worker):
                worker.verdict = f"still running {waited_s:.0f} s after the end of the job"
                worker.child.kill()
        return not living
