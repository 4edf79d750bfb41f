"""An agent without processes: the production decisions, with effects on virtual time.

It does what `elastic.agent` does around the decisions, with every delay, lost reply and stale
view that real ones meet: reads and writes take time and fail while the node is cut off, parking
takes time, a hung worker is killed late, a lease that cannot be renewed ends the workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from ckpt.world import Inventory
from elastic import agree, seating
from elastic.errors import CoordinatorError, ElasticError, LeaseExpired
from elastic.membership import (
    View,
    encode,
    generation_key,
    node_key,
    outcome_key,
    role_of,
    seating_key,
)
from elastic.records import (
    TRAINER,
    JobSpec,
    NodeRecord,
    Outcome,
    Seating,
    WorkerRecord,
    WorkerState,
)
from elastic.testing.simulated_sidecar import SimulatedSidecar

if TYPE_CHECKING:
    from elastic.testing.simulator import Simulation

LEASE_TTL_S = 1.0
KEEP_ALIVE_S = 0.25
SELF_FENCE_S = 0.7
CALL_TIMEOUT_S = 0.4
PARK_TIMEOUT_S = 2.0
HANG_S = 1.5
_SEATERS = 3  # enough to race for it

_T = TypeVar("_T")


@dataclass(slots=True)
class SimulatedWorker:
    """A worker process: what its record says, the generation it acts in (0: none)."""

    seat: str
    attempt: int
    incarnation: str
    spec: JobSpec | None
    state: WorkerState = WorkerState.STARTING
    ready_after: int = 0
    active_in: int = 0
    hung: bool = False
    ending: str = ""

    @property
    def acts(self) -> bool:
        """Whether the process could still do something to the job."""
        return self.state is WorkerState.ACTIVE

    def record(self) -> WorkerRecord:
        """Return what the node publishes about it."""
        return WorkerRecord(
            seat=self.seat,
            incarnation=self.incarnation,
            pid=0,
            state=self.state,
            attempt=self.attempt,
            ready_after=self.ready_after,
            spec=self.spec,
            ending=self.ending,
        )

    def kill(self, ending: str) -> None:
        """End the process."""
        if self.state is not WorkerState.DONE:
            self.state, self.active_in, self.ending = WorkerState.DEAD, 0, ending


@dataclass(slots=True)
class _Call(Generic[_T]):
    name: str
    apply: Callable[[], _T]
    then: Callable[[_T | ElasticError], None]


class SimulatedAgent:
    """One incarnation of a node: agent, sidecar and workers live and die together."""

    def __init__(self, sim: Simulation, name: str, *, slots: dict[str, int], number: int) -> None:
        self.sim, self.name, self.slots = sim, name, slots
        self.incarnation = f"{name}#{number}"
        self.alive, self.connected = True, True
        self.workers: dict[str, SimulatedWorker] = {}
        self.sidecar_starts = 0
        self.sidecar: SimulatedSidecar
        self._start_sidecar()
        self.fenced = 0
        self.view = View(run=sim.run_id, nodes={}, wanted=sim.config.wanted)
        self._inventory: Inventory | None = None
        self._fencing, self._known = 0, 0
        self._seen = agree.Seen()
        self._lease: int | None = None
        self._renewed_s = sim.now_s
        self._calls: deque[_Call[object]] = deque()
        self._calling, self._reading = False, False
        self._deciding: float | None = None
        self._published: NodeRecord | None = None
        self._dirty = False
        self._busy: set[str] = set()
        self._register()
        self._beat()
        self.notice()

    # -- faults --------------------------------------------------------------------------------

    def kill(self) -> None:
        """The whole node is gone, with its memory."""
        self.alive = False
        self.sidecar.alive = False
        for worker in self.workers.values():
            worker.kill("node lost")

    def kill_worker(self, seat: str, ending: str = "killed") -> None:
        """One worker dies; the agent sees it within milliseconds."""
        self.workers[seat].kill(ending)
        self._soon(0.001, 0.01, self._reap)

    def kill_sidecar(self) -> None:
        """The sidecar dies with its memory; the agent starts another."""
        self.sidecar.alive = False
        self._soon(0.1, 0.5, self._start_sidecar)

    def _reap(self) -> None:
        self._settle(self._fencing)
        self.publish()

    def reconnect(self) -> None:
        """The coordinator can be reached again."""
        self.connected = True
        self.notice()

    def _start_sidecar(self) -> None:
        self.sidecar_starts += 1
        address = f"sim://{self.incarnation}/{self.sidecar_starts}"
        self.sidecar = SimulatedSidecar(self.name, address=address, network=self.sim)
        self.sim.addresses[address] = self.sidecar
        if self.sidecar_starts > 1:
            self.publish()

    # -- the coordinator -----------------------------------------------------------------------

    def _soon(self, least_s: float, most_s: float, act: Callable[[], None]) -> None:
        self.sim.schedule.soon(least_s, most_s, lambda: act() if self.alive else None)

    def _call(
        self, name: str, apply: Callable[[], _T], then: Callable[[_T | ElasticError], None]
    ) -> None:
        """Make a call after those before it; a name is queued or under way at most once."""
        if name in self._busy:
            return
        self._busy.add(name)
        self._calls.append(_Call(name, apply, then))  # type: ignore[arg-type]
        self._pump()

    def _pump(self) -> None:
        if self._calling or not self._calls:
            return
        self._calling = True
        call = self._calls.popleft()

        def arrive() -> None:
            if self.connected:
                try:
                    result = call.apply()
                except ElasticError as error:
                    result = error
                self._soon(0.0005, 0.005, lambda: reply(result))
            else:
                reply(None)

        def reply(result: object) -> None:
            if self.connected:
                finish(result)
            else:
                self._soon(CALL_TIMEOUT_S, CALL_TIMEOUT_S, lambda: finish(lost))

        def finish(result: object) -> None:
            self._calling = False
            self._busy.discard(call.name)
            call.then(result)
            self._pump()

        lost = CoordinatorError("no answer")
        self._soon(0.0005, 0.005, arrive)

    def _register(self) -> None:
        def granted(result: int | ElasticError) -> None:
            if isinstance(result, ElasticError):
                self._soon(0.05, 0.1, self._register)
                return
            self._lease, self._renewed_s, self._published = result, asked_s, None
            self.publish()

        asked_s = self.sim.now_s
        self._call("grant", lambda: self.sim.grant(LEASE_TTL_S), granted)

    def _beat(self) -> None:
        """Renew the lease; end the workers before it can run out."""
        asked_s = self.sim.now_s
        if asked_s - self._renewed_s > SELF_FENCE_S:
            self._self_fence()
        if self._lease is not None and self.connected:
            # a connection of its own: nothing delays it but the network
            lease = self._lease
            self._soon(0.0005, 0.005, lambda: self._renew(lease, asked_s))
        self.sim.schedule.after(
            min(KEEP_ALIVE_S, 0.05) if not self.connected else KEEP_ALIVE_S,
            lambda: self._beat() if self.alive else None,
        )

    def _renew(self, lease: int, asked_s: float) -> None:
        if lease != self._lease or not self.connected:
            return
        try:
            self.sim.table.keep_alive(lease, now_s=self.sim.now_s)
            self._renewed_s = asked_s
        except ElasticError:
            self._self_fence()
            self._lease = None
            self._register()

    def _self_fence(self) -> None:
        for worker in self.workers.values():
            if worker.state is not WorkerState.DEAD:
                worker.kill("lease lost")
        self._reap()

    def notice(self) -> None:
        """Something changed at the coordinator: read it after a while."""
        if self._reading or not self.alive:
            return
        self._reading = True

        def read() -> None:
            self._reading = False
            if self.connected:
                self.view = self.sim.view()
                self.carry_on()

        self._soon(*self.sim.config.notice_s, read)

    def publish(self) -> None:
        """Publish the node's record as it is when the call is made."""

        def put() -> int:
            if self._lease is None:
                raise LeaseExpired("the lease was lost")
            self._dirty = False
            record = NodeRecord(
                node=self.name,
                incarnation=self.incarnation,
                domain=self.name,
                sidecar=self.sidecar.address if self.sidecar.alive else "",
                slots=self.slots,
                workers=tuple(w.record() for _, w in sorted(self.workers.items())),
                fenced=self.fenced,
                inventory=self._inventory,
                sidecar_starts=self.sidecar_starts,
            )
            if record == self._published:
                return 0
            key = node_key(self.sim.run_id, self.name)
            revision = self.sim.put(key, encode(record), self._lease)
            self._published = record
            return revision

        def done(result: int | ElasticError) -> None:
            if isinstance(result, ElasticError):
                self._published = None
                self._soon(0.01, 0.05, self.publish)
            elif self._dirty:
                self.publish()

        self._dirty = True
        if self._lease is not None and self.alive:
            self._call("publish", put, done)

    # -- the decisions -------------------------------------------------------------------------

    def carry_on(self) -> None:
        """Bring the node to where the view says it should be."""
        self._deciding = None
        if not self.connected or self._lease is None:
            return
        if self.view.outcome:
            for worker in self.workers.values():
                worker.kill("job ended")
            return
        self._follow_seating()
        self._enter()
        self._seat()
        self._decide()

    def _follow_seating(self) -> None:
        mine = {order.seat: order for order in seating.assigned(self.view.seating, self.name)}
        for seat in [seat for seat in self.workers if seat not in mine]:
            self.workers.pop(seat).kill("seat moved")
            self.publish()
        for order in mine.values():
            worker = self.workers.get(order.seat)
            if worker is None or worker.attempt < order.attempt:
                if worker:
                    worker.kill("superseded")
                self._start_worker(order)

    def _start_worker(self, order: Seating) -> None:
        is_trainer = role_of(order.seat) == TRAINER
        worker = SimulatedWorker(
            order.seat,
            order.attempt,
            f"{self.incarnation}/{order.seat}@{order.attempt}.{self.sim.fresh()}",
            self.sim.config.spec if is_trainer else None,
        )
        self.workers[order.seat] = worker
        self.publish()

        def ready() -> None:
            if worker.state is WorkerState.STARTING:
                worker.state = WorkerState.READY
                self.publish()

        self._soon(*self.sim.config.startup_s, ready)

    def _enter(self) -> None:
        record = self.view.generation
        if record is None or record.number <= max(self._known, self._fencing):
            return
        if self.name not in record.nodes or not self.sidecar.alive:
            return
        self._known = record.number
        self.sidecar.adopt(record.snapshots, restore=record.restore)
        by_incarnation = {member.incarnation for member in record.members}
        for worker in self.workers.values():
            if worker.state is WorkerState.READY and worker.incarnation in by_incarnation:
                worker.state, worker.active_in = WorkerState.ACTIVE, record.number
                self.sim.entered(self, worker)
        self.publish()

    def _seat(self) -> None:
        if self.name not in list(self.view.nodes)[:_SEATERS]:
            return
        decision, reason = seating.seat(
            self.view,
            progress=self.sim.progress,
            max_attempts=self.sim.config.max_attempts,
            expect_nodes=self.sim.config.expect_nodes if self.sim.now_s < 5 else 0,
        )
        if isinstance(decision, seating.Exhausted):
            self._finish(Outcome(ok=False, message=reason))
        elif isinstance(decision, seating.Seat):
            self._set(seating_key(self.sim.run_id), encode(decision.seats), decision.expected)

    def _decide(self) -> None:
        now_s = self.sim.now_s
        self._seen = agree.observe(self.view, self._seen, now_s=now_s)
        decision, reason = agree.decide(self.view, self._seen, node=self.name, now_s=now_s)
        self.sim.judge(self, decision, reason)
        match decision:
            case agree.Fence(generation=generation):
                self._fence(generation, reason)
            case agree.Propose(record=record, expected=expected):
                self._set(generation_key(self.sim.run_id), encode(record), expected)
            case agree.Finish(outcome=outcome):
                self._finish(outcome)
            case agree.Idle(until_s=until_s) | agree.Wait(until_s=until_s):
                if until_s is not None:
                    self._again(until_s - now_s)

    def _again(self, delay_s: float) -> None:
        due_s = self.sim.now_s + max(delay_s, 0.001)
        if self._deciding is None or due_s < self._deciding:
            self._deciding = due_s
            self._soon(due_s - self.sim.now_s, due_s - self.sim.now_s + 0.001, self.carry_on)

    def _set(self, key: str, value: str, expected: int) -> None:
        self._call(
            f"set {key}",
            lambda: self.sim.compare_and_set(key, value, expected, by=self.name),
            lambda result: self.notice(),
        )

    def _finish(self, outcome: Outcome) -> None:
        self._set(outcome_key(self.sim.run_id), encode(outcome), 0)

    def _fence(self, generation: int, reason: str) -> None:
        if generation <= self._fencing:
            return
        self._fencing = generation
        self.sim.log(f"{self.name} fences {generation}: {reason}")
        for worker in self.workers.values():
            if worker.state is WorkerState.ACTIVE:
                self._soon(0.001, 0.09, partial(self._park, worker, generation))
        self._soon(PARK_TIMEOUT_S, PARK_TIMEOUT_S, lambda: self._kill_unparked(generation))
        self._settle(generation)

    def _park(self, worker: SimulatedWorker, generation: int) -> None:
        if worker.state is WorkerState.ACTIVE and not worker.hung:
            worker.ready_after, worker.active_in = max(worker.active_in, 1), 0
            worker.state = WorkerState.READY
            self._settle(generation)

    def _kill_unparked(self, generation: int) -> None:
        for worker in self.workers.values():
            if worker.state is WorkerState.ACTIVE and worker.active_in <= generation:
                worker.kill("did not park")
        self._settle(generation)

    def _settle(self, generation: int) -> None:
        """Once nobody acts any more: take the inventory, then say that the node has fenced."""
        if generation != self._fencing or self.fenced >= generation:
            return
        if any(worker.acts for worker in self.workers.values()):
            return

        def take() -> None:
            if generation != self._fencing or self.fenced >= generation:
                return
            self._inventory = self.sidecar.inventory() if self.sidecar.alive else None
            self.fenced = generation
            self.publish()

        self._soon(0.001, 0.03, take)

    def hang(self, seat: str) -> None:
        """A worker stops making progress; the agent finds out after a while."""
        worker = self.workers[seat]
        worker.hung = True

        def found() -> None:
            if worker.state is WorkerState.ACTIVE:
                worker.kill("hung")
                self._reap()
            elif worker.state in (WorkerState.STARTING, WorkerState.READY):
                self._soon(HANG_S, HANG_S + 0.1, found)

        self._soon(HANG_S, HANG_S + 0.1, found)
