"""The workers of a simulated node: started, parked, killed and hung on virtual time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from holdfast.elastic.decisions import moving, seating
from holdfast.elastic.membership.records import (
    TRAINER,
    GenerationRecord,
    Seating,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView, role_of
from holdfast.elastic.testing.simulation.worker import SimulatedWorker

if TYPE_CHECKING:
    from holdfast.elastic.testing.simulation.agent import SimulatedAgent

PARK_TIMEOUT_S = 2.0
HANG_S = 1.5


class SimulatedCrew:
    """The workers of one node, by seat."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self._agent, self._sim = agent, agent.sim
        self.workers: dict[str, SimulatedWorker] = {}

    @property
    def acts(self) -> bool:
        """True if a worker could still affect the job."""
        return any(worker.acts for worker in self.workers.values())

    def kill(self, ending: str) -> None:
        """End the processes of all workers."""
        for worker in self.workers.values():
            worker.kill(ending)

    # -- seats and generations -----------------------------------------------------------------

    def follow(self, view: JobView) -> None:
        """Start and end workers as the seating requires."""
        orders = {order.seat: order for order in seating.assigned(view.seating, self._agent.name)}
        gone = moving.dismissed(view, self.workers)
        for seat in [seat for seat in self.workers if seat not in orders]:
            if seat not in gone or self._has_gone(self.workers[seat]):
                self.workers.pop(seat).kill("seat moved")
                self._agent.publish()
        parting = any(seat not in orders for seat in self.workers)
        for order in orders.values():
            worker = self.workers.get(order.seat)
            if parting and worker is None:
                continue
            if worker is None or worker.attempt < order.attempt:
                if worker:
                    worker.kill("superseded")
                self._start(order)

    def _has_gone(self, worker: SimulatedWorker) -> bool:
        """Return whether a worker whose seat is gone may end; else let it hand over."""
        role = role_of(worker.seat)
        step = moving.farewell(role, worker.state, handed=worker.handed, since_s=0.0)
        if step is moving.Farewell.HAND_OVER:

            def hand_over() -> None:
                worker.handed = True
                self._agent.carry_on()

            self._agent.soon(0.01, 0.2, hand_over)
        return step is moving.Farewell.END

    def _start(self, order: Seating) -> None:
        is_trainer = role_of(order.seat) == TRAINER
        worker = SimulatedWorker(
            order.seat,
            order.attempt,
            f"{self._agent.incarnation}/{order.seat}@{order.attempt}.{self._sim.fresh()}",
            self._sim.config.spec if is_trainer else None,
        )
        self.workers[order.seat] = worker
        self._agent.publish()

        def ready() -> None:
            if worker.state is WorkerState.STARTING:
                worker.state = WorkerState.READY
                self._agent.publish()

        self._agent.soon(*self._sim.config.startup_s, ready)

    def enter(self, record: GenerationRecord) -> None:
        """Let the members of a generation act in it."""
        members = {member.incarnation for member in record.members}
        for worker in self.workers.values():
            if worker.state is WorkerState.READY and worker.incarnation in members:
                worker.state, worker.active_in = WorkerState.ACTIVE, record.number
                self._sim.entered(self._agent, worker)

    # -- fences --------------------------------------------------------------------------------

    def park(self, generation: int) -> None:
        """Park the workers that act, soon; kill those that do not park in time."""
        for worker in self.workers.values():
            if worker.state is WorkerState.ACTIVE:
                self._agent.soon(0.001, 0.09, partial(self._park, worker, generation))
        kill = partial(self._kill_unparked, generation)
        self._agent.soon(PARK_TIMEOUT_S, PARK_TIMEOUT_S, kill)

    def _park(self, worker: SimulatedWorker, generation: int) -> None:
        if worker.state is WorkerState.ACTIVE and not worker.hung:
            worker.ready_after, worker.active_in = max(worker.active_in, 1), 0
            worker.state = WorkerState.READY
            self._agent.settle(generation)

    def _kill_unparked(self, generation: int) -> None:
        for worker in self.workers.values():
            if worker.state is WorkerState.ACTIVE and worker.active_in <= generation:
                worker.kill("did not park")
        self._agent.settle(generation)

    # -- hangs ---------------------------------------------------------------------------------

    def hang(self, seat: str, *, lasts_s: float = 0.0) -> None:
        """Make a worker hang; the agent detects it after a delay.

        It continues after ``lasts_s``, unless that is 0 or it was killed meanwhile.
        """
        worker = self.workers[seat]
        worker.hung = True
        if lasts_s:
            self._sim.schedule.after(lasts_s, partial(self._wake, worker))

        def found() -> None:
            if not worker.hung:
                return
            if worker.state is WorkerState.ACTIVE:
                worker.kill("hung")
                self._agent.reap()
            elif worker.state in (WorkerState.STARTING, WorkerState.READY):
                self._agent.soon(HANG_S, HANG_S + 0.1, found)

        self._agent.soon(HANG_S, HANG_S + 0.1, found)

    def _wake(self, worker: SimulatedWorker) -> None:
        worker.hung = False
        fencing = self._agent.part.fencing
        if worker.active_in <= fencing:
            self._park(worker, fencing)
        if worker.acts:
            self._sim.training.woke(worker.active_in)
