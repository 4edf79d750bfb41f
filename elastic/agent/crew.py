"""The crew: starts a node's workers as the seating says, watches, fences and ends them."""

from __future__ import annotations

import errno
import selectors
import statistics
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.parting import Parting
from holdfast.elastic.agent.reporting import Reporter
from holdfast.elastic.agent.stacks import stand_of
from holdfast.elastic.agent.workers import SeatProcess, WorkerTable, server_spec
from holdfast.elastic.decisions.detect import (
    park_limit_s,
    probe_limit_s,
    silence_limit_s,
    stall_limit_s,
)
from holdfast.elastic.decisions.restarting import Restarts, again, pause_s
from holdfast.elastic.events import (
    DataWorkerDeath,
    DataWorkerHang,
    Detected,
    RolesAsked,
    StepDone,
    WorkerExited,
    WorkerHalted,
    WorkerHandedOver,
    WorkerStack,
    WorkerStarted,
    decode,
)
from holdfast.elastic.events.job import MOVED
from holdfast.elastic.membership import messages
from holdfast.elastic.membership.phases import WorkerPhase
from holdfast.elastic.membership.records import (
    TRAINER,
    GenerationRecord,
    Roster,
    Seating,
    WorkerState,
)
from holdfast.elastic.membership.view import role_of
from holdfast.elastic.preload.keeping import Preloading
from holdfast.elastic.processes.children import ChildChange, ChildStatus, describe_exit

_STEPS_LONG, _STEP_LEAST_S = 5.0, 1.0  # two steps, while another worker starts
_AT_WORK = (WorkerState.READY, WorkerState.ACTIVE)
_PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT)
"""Reasons why a process cannot be started now, which may pass."""


class Crew:
    """The workers of one node."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        selector: selectors.BaseSelector,
        reporter: Reporter,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` wakes the loop; callable from any thread."""
        self._wake = wake
        self._config, self._selector, self._reporter = config, selector, reporter
        self._timing = config.timing
        self._roster = Roster()
        self.table = WorkerTable()
        self._preloading = Preloading(
            config.preload,
            server_spec(config),
            node=config.node,
            inherited=config.fork_server,
            selector=selector,
        )
        self.job_failure = ""
        """The first reason why the whole job fails; `Conductor` ends the job with it."""
        self._over = False
        self._parting = Parting(stop_timeout_s=config.timing.stop_timeout_s)
        self._unstarted: dict[str, Restarts] = {}

    @property
    def seats(self) -> list[str]:
        """The seats of its workers, ended ones included."""
        return [worker.seat for worker in self.table]

    @property
    def suspicious(self) -> bool:
        """True if a worker is stopped or its stacks are being read; it will be ended soon."""
        return any(worker.stopped_s is not None or worker.probe for worker in self.table.living())

    @property
    def failures(self) -> list[str]:
        """The workers that completed their part and then ended with an error, as clauses."""
        return [
            f"{worker.seat} completed its part of the job and then ended with {worker.ending}"
            for worker in self.table
            if worker.broke
        ]

    @property
    def data_troubles(self) -> dict[str, str]:
        """The failures of the living workers' data loading processes, by seat."""
        return {w.seat: w.data_trouble for w in self.table.living() if w.data_trouble}

    @property
    def fork_server(self) -> int:
        """The process id of the node's fork server, 0 while there is none."""
        return self._preloading.pid

    # -- the seating -------------------------------------------------------------------------

    def follow(
        self,
        seats: Sequence[Seating],
        *,
        sidecar: str,
        progress: int = -1,
        gone: Collection[str] = (),
    ) -> None:
        """Start workers that are seated here but not running; end those no longer seated here.

        ``progress`` grows with every newly protected step. Workers of seats that are ``gone``, as
        they moved to another role, end once that costs nothing; their successors wait for that.
        """
        orders = {order.seat: order for order in seats}
        for worker in self.table:
            order = orders.get(worker.seat)
            again = order is not None and order.attempt > worker.attempt
            if worker.seat in gone or (again and worker in self._parting):
                self._parting.lead_out(worker)
                self._adjust(worker)
            elif order is None:
                worker.child.kill()
            if order is None and not worker.alive:
                self.table.drop(worker.seat)
        parting = any(worker in self._parting for worker in self.table.living())
        for order in seats:
            known = self.table.get(order.seat)
            due = known is None or (not known.alive and order.attempt > known.attempt)
            if parting and (known is None or known in self._parting):
                continue  # its slot is not free yet
            held = self._preloading.holds or self._waits(order, known) or self._yields(known)
            if due and not held:
                self._start(order, sidecar=sidecar, progress=progress)

    def _waits(self, order: Seating, lost: SeatProcess | None) -> bool:
        """Return whether the seat failed so often in a row that its cause gets time to pass."""
        now_s = time.monotonic()
        if lost and now_s < lost.ended_s + pause_s(order.failures):
            return True
        unstarted = self._unstarted.get(order.seat)
        return unstarted is not None and now_s < unstarted.due_s

    def _yields(self, lost: SeatProcess | None) -> bool:
        """Return whether a replacement waits a little; its start takes seconds of processor time.

        The survivors on this node get the processor first, until they train again.
        """
        if lost is None or lost.generation == 0:
            return False
        if time.monotonic() - lost.ended_s > self._timing.yield_s:
            return False
        recovering = [w for w in self.table.living() if w.recovers_from(lost.generation)]
        return any(w.spec and w.spec.least <= self._trainers_left() for w in recovering)

    def _trainers_left(self) -> int:
        """Return the number of trainers in the whole job that take part or could at once."""
        going = (WorkerState.READY, WorkerState.ACTIVE)
        workers = [worker for node in self._roster.nodes for worker in node.workers]
        return sum(role_of(w.seat) == TRAINER and w.state in going for w in workers)

    def _start(self, order: Seating, *, sidecar: str, progress: int) -> None:
        try:
            before = self.table.get(order.seat)
            worker = SeatProcess(
                order,
                config=self._config,
                sidecar=sidecar,
                before=before,
                server=self._preloading.ready,
            )
        except OSError as error:
            self._not_started(order.seat, error, progress=progress)
            return
        self.table.put(worker)
        self._listen(worker, selectors.EVENT_READ)
        worker.send(messages.RosterChanged(roster=self._roster))
        self._reporter.emit(
            WorkerStarted(seat=worker.seat, pid=worker.child.pid, attempt=worker.attempt)
        )

    def _not_started(self, seat: str, error: OSError, *, progress: int) -> None:
        """End the job if there is no such program, or if the machine refuses again and again."""
        restarts = again(
            self._unstarted.get(seat, Restarts()),
            progress=progress,
            most=self._config.max_attempts,
            now_s=time.monotonic(),
        )
        if error.errno not in _PASSING or restarts is None:
            command = " ".join(self._config.command)
            self._fail_job(f"{seat} cannot be started ({command}): {error}")
            return
        self._unstarted[seat] = restarts

    def _fail_job(self, reason: str) -> None:
        self.job_failure = self.job_failure or reason

    # -- messages of workers -----------------------------------------------------------------

    def _listen(self, worker: SeatProcess, events: int) -> None:
        self._selector.register(worker.socket, events, lambda mask: self._on_socket(worker, mask))

    def _on_socket(self, worker: SeatProcess, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            worker.flush()
        if mask & selectors.EVENT_READ:
            self._receive(worker)
        self._adjust(worker)

    def _adjust(self, worker: SeatProcess) -> None:
        """Watch the socket for writability exactly while bytes wait to be written."""
        if worker.socket.fileno() >= 0 and worker.socket in self._selector.get_map():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.sending else 0)
            key = self._selector.get_key(worker.socket)
            if key.events != events:
                self._selector.modify(worker.socket, events, key.data)

    def _receive(self, worker: SeatProcess) -> None:
        try:
            arrived, closed = worker.receive()
        except (HoldfastError, msgspec.MsgspecError) as error:
            worker.error = f"it does not speak the worker protocol: {error}"
            worker.child.kill()
            self._selector.unregister(worker.socket)
            return
        for message in arrived:
            self._handle(worker, message)
        if closed:
            self._selector.unregister(worker.socket)

    def _handle(self, worker: SeatProcess, message: messages.FromWorker) -> None:
        match message:
            case messages.Ready():
                self._on_ready(worker, message)
            case messages.Emit():
                self._on_emit(worker, message)
            case messages.Halted():
                worker.halted = message.generation
                self._reporter.emit(
                    WorkerHalted(seat=worker.seat, generation=message.generation, step=message.step)
                )
            case messages.HandedOver():
                self._on_handed_over(worker, message)
            case messages.Done():
                worker.state, worker.result = WorkerState.DONE, message.result
                worker.lingers = message.lingers
            case messages.Fail():
                worker.error, worker.fault = message.message, message.fault
                if message.user_error:
                    self._fail_job(message.message)

    def _on_ready(self, worker: SeatProcess, message: messages.Ready) -> None:
        if message.after < worker.generation:
            return  # sent before it learned of its present generation
        if worker.state is WorkerState.DONE and not _goes_on(worker, message):
            return
        worker.state, worker.ready_after = WorkerState.READY, message.after
        worker.spec, worker.info = message.spec, message.info
        worker.watch_life(self._wake)
        joins = self._roster.generation is not None and message.after == 0
        if joins and worker.role == TRAINER:
            self._reporter.emit(Detected(what="join", victim=worker.seat))

    def _on_emit(self, worker: SeatProcess, message: messages.Emit) -> None:
        match event := decode(message.event):
            case StepDone():
                worker.stepped_in(event)
            case RolesAsked():
                worker.asked(event)
            case DataWorkerDeath() | DataWorkerHang():
                worker.data_failed(event)
        self._reporter.relay(worker.seat, event)

    def _on_handed_over(self, worker: SeatProcess, message: messages.HandedOver) -> None:
        worker.handed = message.generation
        if worker.role == TRAINER:
            self._reporter.emit(
                WorkerHandedOver(seat=worker.seat, generation=message.generation, step=message.step)
            )

    # -- exits, stops and hangs -----------------------------------------------------------------

    def check(self) -> None:
        """Detect exits, stops and hangs; end the workers that have to be ended."""
        self._preloading.check()
        if self._preloading.failure:
            self._fail_job(self._preloading.failure)
        now_s = time.monotonic()
        for worker in self.table.living():
            while status := worker.child.poll():
                self._on_status(worker, status, now_s=now_s)
            if worker.alive:
                self._judge(worker, now_s=now_s)

    def _on_status(self, worker: SeatProcess, status: ChildStatus, *, now_s: float) -> None:
        match status.change:
            case ChildChange.EXITED:
                self._on_exit(worker, status.code)
            case ChildChange.STOPPED:
                worker.stopped_s = now_s
            case ChildChange.CONTINUED:
                worker.stopped_s = None

    def _judge(self, worker: SeatProcess, *, now_s: float) -> None:
        stopped_s = worker.stopped_s
        if worker.probe is not None:
            self._await_stacks(worker)
        elif stopped_s is not None and now_s - stopped_s > self._timing.stop_grace_s:
            self._put_down(worker, what="stopped", why=f"stopped for {now_s - stopped_s:.2f} s")
        elif worker.state is WorkerState.ACTIVE and (why := self._hung(worker)):
            self._put_down(worker, what="hang", why=why)

    def _hung(self, worker: SeatProcess) -> str | None:
        beat = worker.page.last_beat()
        limit_s = silence_limit_s(
            beat,
            worker.step_seconds,
            first=worker.stepped < worker.generation,
            limits=self._timing.limits,
        )
        silent_s = (time.monotonic_ns() - beat.at_ns) / 1e9
        if not beat.count or limit_s is None or silent_s <= limit_s:
            return None
        return f"no progress for {silent_s:.1f} s in step {beat.step}, {limit_s:.3g} s are allowed"

    def _put_down(self, worker: SeatProcess, *, what: str, why: str) -> None:
        """SIGKILL a worker that would never end by itself; its exit is detected like any other.

        For a hanging worker, first try for a moment to read its stacks.
        """
        if worker.verdict is None:
            worker.verdict = why
            self._reporter.emit(Detected(what=what, victim=worker.seat, why=why))
            if what == "hang":
                worker.ask_stacks()
            if worker.probe is None:
                worker.child.kill()

    def _await_stacks(self, worker: SeatProcess) -> None:
        found = worker.probe.poll() if worker.probe else None
        if found is not None:
            worker.probe, worker.stands = None, stand_of(found.text)
            if worker.verdict is None and worker.stalled < worker.generation:
                return  # it may still go on
            self._reporter.emit(
                WorkerStack(
                    seat=worker.seat,
                    how=found.how,
                    at=found.at,
                    text=found.text,
                    kernel=found.kernel,
                )
            )
            if worker.verdict is not None:
                worker.child.kill()

    def stalled(self, generation: int) -> bool:
        """Return whether all trainers here have waited too long for others, once stacks are read.

        The trainers are not ended: only from all ranks of the job together it follows that none can
        continue.
        """
        inside = self._trainers_in(generation)
        if not inside or not all(self._meets_too_long(worker, stall_limit_s) for worker in inside):
            return False
        for worker in inside:
            if worker.stalled != generation:
                worker.stalled = generation
                worker.ask_stacks()
        return not any(worker.probe for worker in inside)

    def waits(self, generation: int) -> bool:
        """Return whether all trainers here wait so long that the node should probe the others."""
        inside = self._trainers_in(generation)
        return bool(inside) and all(self._meets_too_long(w, probe_limit_s) for w in inside)

    def stands(self, generation: int) -> dict[str, str]:
        """Return where the trainers here wait in the user's code, by seat, as far as it is known.

        Their stacks are read once all of them have waited as long as for `waits`.
        """
        if not self.waits(generation):
            return {}
        inside = self._trainers_in(generation)
        for worker in inside:
            since_ns = worker.page.last_beat().at_ns
            if worker.asked_ns != since_ns:
                worker.asked_ns, worker.stands = since_ns, ""
                worker.ask_stacks()
        return {worker.seat: worker.stands for worker in inside if worker.stands}

    def _meets_too_long(self, worker: SeatProcess, limit: Callable[..., float]) -> bool:
        beat = worker.page.last_beat()
        first = worker.stepped < worker.generation
        limit_s = limit(worker.step_seconds, first=first, limits=self._timing.limits)
        return beat.phase is WorkerPhase.MEET and time.monotonic_ns() - beat.at_ns > limit_s * 1e9

    def _on_exit(self, worker: SeatProcess, code: int) -> None:
        if worker.socket in self._selector.get_map():
            self._receive(worker)  # its last messages
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
            if worker.verdict is None and not self._over and worker not in self._parting:
                self._reporter.emit(Detected(what="exit", victim=worker.seat, why=worker.ending))
        self._reporter.emit(
            WorkerExited(seat=worker.seat, pid=worker.child.pid, status=worker.ending)
        )
        worker.close()

    def _never_trained(self, worker: SeatProcess) -> None:
        """End a job whose script never trains, unless a generation exists already."""
        if self._roster.generation is None:
            command = " ".join(self._config.command)
            self._fail_job(
                f"{worker.seat} ended without training ({command}): the script must call a "
                "function decorated with @holdfast.resilient"
            )

    def _describe(self, worker: SeatProcess, code: int) -> str:
        ending = describe_exit(code)
        if worker in self._parting and not worker.verdict:
            return MOVED
        if self._over and worker.state is not WorkerState.DONE and not worker.verdict:
            return "it ended with the job"  # it came too late to train
        if code == 0 and worker.state is not WorkerState.DONE:
            ending = "exit status 0 before its part of the job was complete"
        return f"{ending}: {detail}" if (detail := worker.verdict or worker.error) else ending

    # -- at the end of a step ---------------------------------------------------------------

    def halt(self, generation: int) -> None:
        """Make the trainers of ``generation`` halt at the end of their step."""
        for worker in self._trainers_in(generation):
            worker.page.set_halt(generation)

    def stand(self, generation: int) -> bool:
        """Return whether there are trainers of ``generation`` here and all of them have halted."""
        inside = self._trainers_in(generation)
        return bool(inside) and all(worker.halted == generation for worker in inside)

    def step_s(self, generation: int) -> float | None:
        """Return the time limit of the halt, from their last steps; None without trainers.

        It uses the median, because a first step may compile and says nothing about later ones.
        """
        inside = self._trainers_in(generation)
        taken_s = [statistics.median(w.step_seconds) for w in inside if w.step_seconds]
        return _STEPS_LONG * max(taken_s, default=0.0) + _STEP_LEAST_S if inside else None

    def hand_over(self) -> None:
        """Make the trainers hand over at the end of their step."""
        for worker in self.table.living():
            if worker.role == TRAINER:
                worker.page.set_leaving()

    def tell_others(self) -> None:
        """Make the workers of other roles hand over at once."""
        for worker in self.table.living():
            if worker.role != TRAINER:
                worker.page.set_leaving()

    def others(self) -> int:
        """Return the number of workers of other roles that still have to hand over."""
        return sum(
            worker.role != TRAINER and worker.state in _AT_WORK and not worker.handed
            for worker in self.table.living()
        )

    def handed(self, generation: int) -> set[str]:
        """Return the incarnations of the workers halted at a safe step of ``generation``."""
        return {w.incarnation for w in self.table.living() if w.handed == generation > 0}

    # -- generations ------------------------------------------------------------------------

    def begin(self, record: GenerationRecord) -> None:
        """Send a generation to its members on this node that are READY."""
        incarnations = {member.incarnation for member in record.members}
        for worker in self.table.living():
            if worker.incarnation in incarnations and worker.state is WorkerState.READY:
                worker.state, worker.generation = WorkerState.ACTIVE, record.number
                self._send(worker, messages.Begin(record=record))

    def fence(self, generation: int) -> None:
        """Make every worker leave ``generation`` and older; `parked` tells when all have."""
        now_s = time.monotonic()
        for worker in self._inside(generation):
            worker.park_by_s = now_s + self._park_limit_s(worker)
            worker.fence(generation)
            self._adjust(worker)

    def parked(self, generation: int) -> bool:
        """Return whether no worker acts in ``generation`` any more.

        End those that take too long.
        """
        inside, now_s = self._inside(generation), time.monotonic()
        for worker in inside:
            if now_s > worker.park_by_s:
                limit_s = self._park_limit_s(worker)
                self._put_down(worker, what="hang", why=f"did not leave within {limit_s:.3g} s")
        return not inside

    def _park_limit_s(self, worker: SeatProcess) -> float:
        return park_limit_s(
            worker.quiet_seconds, least_s=self._timing.park_timeout_s, limits=self._timing.limits
        )

    def _trainers_in(self, generation: int) -> list[SeatProcess]:
        return [w for w in self._inside(generation) if w.role == TRAINER]

    def _inside(self, generation: int) -> list[SeatProcess]:
        return [
            worker
            for worker in self.table.living()
            if worker.state is WorkerState.ACTIVE and worker.generation <= generation
        ]

    def tell(self, roster: Roster) -> None:
        """Send the roster to every worker if it has changed."""
        if roster != self._roster:
            self._roster = roster
            for worker in self.table.living():
                self._send(worker, messages.RosterChanged(roster=roster))
            self._miss_broken()

    def _miss_broken(self) -> None:
        """Count the workers that broke between two stages as DEAD: the next stage wants them."""
        for worker in self.table:
            stage = worker.spec.stage if worker.spec else 0
            if worker.broke and self._roster.in_stages_after(stage):
                worker.state = WorkerState.DEAD
                self._reporter.emit(Detected(what="exit", victim=worker.seat, why=worker.ending))

    def _send(self, worker: SeatProcess, message: messages.FromAgent) -> None:
        worker.send(message)
        self._adjust(worker)

    # -- the end ----------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Ask every worker to end, with the job."""
        self._over = True
        self._preloading.close()
        for worker in self.table.living():
            worker.stop(reason)
            self._adjust(worker)

    def close(self) -> None:
        """End what starts workers."""
        self._preloading.close()

    def end_late(self, waited_s: float, *, grace_s: Callable[[SeatProcess], float]) -> bool:
        """SIGKILL the workers whose grace is over; return whether all have ended."""
        living = self.table.living()
        for worker in living:
            if waited_s > grace_s(worker):
                worker.verdict = f"still running {waited_s:.0f} s after the end of the job"
                worker.child.kill()
        return not living


def _goes_on(worker: SeatProcess, message: messages.Ready) -> bool:
    """Return whether a worker that has completed its part is ready for a later stage."""
    before, now = worker.spec, message.spec
    return before is not None and now is not None and now.stage > before.stage
