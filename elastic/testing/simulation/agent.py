"""A simulated agent without processes: production decisions, with effects on virtual time.

It does the work of `holdfast.elastic.agent` around the decisions, with every delay, lost reply and
stale view that real agents meet: reads and writes take time and fail while the network is
disturbed, parking takes time, a hung worker is killed late, and a lease that cannot be renewed ends
the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.memory.records import Inventory
from holdfast.elastic.coordinator.base import Entry
from holdfast.elastic.decisions import agree, deciding, seating
from holdfast.elastic.decisions.detect import stalled
from holdfast.elastic.decisions.part import AgentPart
from holdfast.elastic.decisions.probing import Probing
from holdfast.elastic.errors import LeaseExpiredError
from holdfast.elastic.events import FencingBegun, FencingDone, SidecarStarted
from holdfast.elastic.membership.following import following
from holdfast.elastic.membership.records import (
    TRAINER,
    JobOutcome,
    NodeRecord,
    Seating,
    WorkerState,
)
from holdfast.elastic.membership.view import (
    JobView,
    bulletin_key,
    encode,
    generation_key,
    node_key,
    outcome_key,
    role_of,
    seating_key,
)
from holdfast.elastic.planning.inventories import compact
from holdfast.elastic.planning.reach import is_wondering
from holdfast.elastic.testing.simulation.calls import CoordinatorCalls
from holdfast.elastic.testing.simulation.network import COORDINATOR
from holdfast.elastic.testing.simulation.probes import ask_all
from holdfast.elastic.testing.simulation.sidecar import SimulatedSidecar
from holdfast.elastic.testing.simulation.worker import SimulatedWorker

if TYPE_CHECKING:
    from holdfast.elastic.testing.simulation.simulator import Simulation

LEASE_TTL_S = 1.0
KEEP_ALIVE_S = 0.25
SELF_FENCE_S = 0.7
PARK_TIMEOUT_S = 2.0
HANG_S = 1.5
HALT_S = 1.0
STALL_S = 0.5
_LOOK_EVERY_S = 0.1
_READ_RETRY_S = 0.1
_SEATERS = 3  # enough for races


class SimulatedAgent:
    """One incarnation of a node: agent, sidecar and workers live and die together."""

    def __init__(self, sim: Simulation, name: str, *, slots: dict[str, int], number: int) -> None:
        self.sim, self.name, self.slots = sim, name, slots
        self.incarnation = f"{name}#{number}"
        self.alive = True
        self.workers: dict[str, SimulatedWorker] = {}
        self.sidecar_starts = 0
        self.sidecar: SimulatedSidecar
        self.fenced = 0
        self.view = JobView(run=sim.run_id, nodes={}, wanted=sim.config.wanted)
        self._part = AgentPart(
            name,
            incarnation=self.incarnation,
            expected=sim.config.nodes,
            most=sim.config.most_watchers,
            places=sim.config.deciders,
        )
        self.follows = not self._part.watches
        self._halting, self._why = 0, ""
        self._inventory: Inventory | None = None
        self._fencing, self._known = 0, 0
        self.halts = self.standing_generation = 0  # generations
        self._seen = agree.FirstSeen()
        self._probing = Probing(name)
        self._looks_around = False
        self._lease: int | None = None
        self._renewed_s = sim.now_s
        self._calls = CoordinatorCalls(self)
        self._reading = False
        self._deciding: float | None = None
        self._published: tuple[NodeRecord, int] | None = None
        self._dirty = False
        self._paused = False
        self._missed: list[Callable[[], None]] = []
        self._crash: tuple[int, bool, Callable[[], None]] | None = None
        self._start_sidecar()
        self._register()
        self._beat()
        self.notice()

    # -- time ----------------------------------------------------------------------------------

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` after ``delay_s`` if the agent still lives then; if paused, on resume."""
        self.sim.schedule.after(delay_s, lambda: self._do(act))

    def _soon(self, least_s: float, most_s: float, act: Callable[[], None]) -> None:
        self.sim.schedule.soon(least_s, most_s, lambda: self._do(act))

    def _do(self, act: Callable[[], None]) -> None:
        if self._paused:
            self._missed.append(act)
        elif self.alive:
            act()

    # -- faults --------------------------------------------------------------------------------

    def kill(self) -> None:
        """Lose the whole node, with its memory."""
        self.alive = False
        self.sidecar.end()
        for worker in self.workers.values():
            worker.kill("node lost")

    def kill_worker(self, seat: str, ending: str = "killed") -> None:
        """Kill one worker; the agent detects it within milliseconds."""
        self.workers[seat].kill(ending)
        self._soon(0.001, 0.01, self._reap)

    def kill_sidecar(self) -> None:
        """Kill the sidecar with its memory; the agent starts another."""
        self.sidecar.end()
        self._soon(0.1, 0.5, self._start_sidecar)

    def pause(self) -> None:
        """Stop the agent; its workers act only until the time that its lease allows."""
        if self._paused:
            return
        self._paused = True
        left_s = max(self._renewed_s + SELF_FENCE_S - self.sim.now_s, 0.0)
        self.sim.schedule.after(left_s, self._end_overdue)

    def _end_overdue(self) -> None:
        overdue = self.sim.now_s >= self._renewed_s + SELF_FENCE_S
        if self.alive and self._paused and overdue:
            for worker in self.workers.values():
                worker.kill("its agent is stopped")

    def resume(self) -> None:
        """Let it continue, with everything that it missed; cancel a planned crash at a call."""
        self._crash = None
        missed, self._missed, self._paused = self._missed, [], False
        for act in missed:
            self.sim.schedule.soon(0.0, 0.002, lambda act=act: self._do(act))  # type: ignore[misc]
        self._soon(0.0, 0.002, self._reap)

    def crash_at_call(self, number: int, *, before: bool, then: Callable[[], None]) -> None:
        """Lose the node at the call after ``number`` more: before it is sent, or right after."""
        self._crash = number, before, then

    def passes_call(self, send: Callable[[], None]) -> None:
        """Make a call, unless the node is lost before it."""
        if self._crash is None:
            send()
            return
        left, before, then = self._crash
        if left or not before:
            send()
        if left:
            self._crash = left - 1, before, then
        else:
            self.sim.log(f"{self.name} crashes at a call")
            self.kill()
            then()

    def _reap(self) -> None:
        self._settle(self._fencing)
        self.publish()

    def _start_sidecar(self) -> None:
        self.sidecar_starts += 1
        address = f"sim://{self.incarnation}/{self.sidecar_starts}"
        self.sidecar = SimulatedSidecar(
            self.name,
            address=address,
            network=self.sim,
            payload_bytes=self.sim.config.payload_bytes,
        )
        self.sim.addresses[address] = self.sidecar
        self.sim.tell(SidecarStarted(node=self.name))
        if self.sidecar_starts > 1:
            self.publish()

    # -- the coordinator -----------------------------------------------------------------------

    def _register(self) -> None:
        def granted(result: int | HoldfastError) -> None:
            if isinstance(result, HoldfastError):
                self._soon(0.05, 0.1, self._register)
                return
            self._lease, self._renewed_s, self._published = result, asked_s, None
            self.publish()

        asked_s = self.sim.now_s
        self._calls.make("grant", lambda: self.sim.grant(LEASE_TTL_S), granted)

    def _beat(self) -> None:
        """Renew the lease; end the workers before it can run out, and then give it up.

        A node that can send but not receive would keep its lease, and the others would wait.
        """
        asked_s = self.sim.now_s
        if self._lease is not None and asked_s - self._renewed_s > SELF_FENCE_S:
            self._lose_lease()
        if self._lease is not None:
            self._renew(self._lease, asked_s)
            if self.follows:
                self._look_at_own()
        self.after(KEEP_ALIVE_S if self._is_punctual(asked_s) else 0.05, self._beat)

    def _is_punctual(self, now_s: float) -> bool:
        return now_s - self._renewed_s < KEEP_ALIVE_S * 1.5

    def _renew(self, lease: int, asked_s: float) -> None:
        def renewed(result: object) -> None:
            if lease != self._lease:
                return
            if isinstance(result, HoldfastError):
                self._lose_lease()
            else:
                self._renewed_s = max(self._renewed_s, asked_s)

        self._calls.once(lambda: self.sim.table.keep_alive(lease, now_s=self.sim.now_s), renewed)

    def _look_at_own(self) -> None:
        """Read the node's own record, which a follower does not watch."""

        def found(result: Entry | HoldfastError | None) -> None:
            if isinstance(result, HoldfastError) or self._published is None:
                return
            published, at = self._published
            if (result is None and at <= asked_at) or (
                result is not None and result.revision > at and result.value != encode(published)
            ):
                self._published = None
                self.publish()

        key, asked_at = node_key(self.sim.run_id, self.name), self.sim.table.revision
        self._calls.once(lambda: self.sim.table.get(key), found)

    def _lose_lease(self) -> None:
        self._lease = None
        for worker in self.workers.values():
            if worker.state is not WorkerState.DEAD:
                worker.kill("lease lost")
        self._reap()
        self._register()

    def notice(self) -> None:
        """Handle a change at the coordinator: read it after a delay."""
        if not self._reading and self.alive:
            self._reading = True
            self._read()

    def _read(self) -> None:
        copies = () if self.sim.is_out else self.sim.network.fate(COORDINATOR, self.name)
        least_s, most_s = self.sim.config.notice_s
        if copies:
            self._soon(least_s + min(copies), most_s + min(copies), self._look)
        else:
            self.after(_READ_RETRY_S, self._read)

    def _look(self) -> None:
        self._reading = False
        view = self.sim.view()
        if view.revision < self.view.revision:
            return
        self.follows = not self._part.watches
        self.sim.looks["follower" if self.follows else "watcher"] += 1
        self.view = following(view, self._record()) if self.follows else view
        if not self.follows and self._is_misquoted():
            self._published = None
            self.publish()
        self.carry_on()

    def _is_misquoted(self) -> bool:
        """Return whether the coordinator shows a record of this node other than the last published.

        An older write of this node may take effect after a newer one, and the end of an old lease
        deletes the records written under it.
        """
        if self._published is None:
            return False
        record, revision = self._published
        shown = self.view.decoded.get(node_key(self.sim.run_id, self.name))
        if shown is None:
            return self.view.revision >= revision
        return shown[0] > revision and shown[1] != record

    def publish(self) -> None:
        """Publish the node's record in its state at the time of the call."""

        def put() -> int:
            if lease is None:
                raise LeaseExpiredError("the lease was lost")
            key = node_key(self.sim.run_id, self.name)
            return self.sim.put(key, encode(record), lease)

        def done(result: int | HoldfastError) -> None:
            if isinstance(result, HoldfastError):
                self._published = None
                self._soon(0.01, 0.05, self.publish)
                return
            self._published = record, result
            if self._dirty:
                self.publish()
            elif self.follows:
                self.notice()

        self._dirty = True
        if self._calls.is_waiting("publish"):
            return
        record, lease = self._record(), self._lease
        self._dirty = False
        if lease is not None and self.alive and (record, lease) != self._stands():
            self._calls.make("publish", put, done)

    def _stands(self) -> tuple[NodeRecord, int | None] | None:
        return (self._published[0], self._lease) if self._published else None

    def _record(self) -> NodeRecord:
        return NodeRecord(
            node=self.name,
            incarnation=self.incarnation,
            domain=self.sim.domain_of(self.name),
            sidecar=self.sidecar.address if self.sidecar.alive else "",
            slots=self.slots,
            workers=tuple(w.record() for _, w in sorted(self.workers.items())),
            fenced=self.fenced,
            inventory=self._inventory,
            sidecar_starts=self.sidecar_starts,
            stalled=self._known if self._waits() else 0,
            unreachable=self._probing.unreachable,
            probed=0 if self.follows else self._probing.probed(self.view),
        )

    # -- reachability --------------------------------------------------------------------------

    def stand_by(self) -> None:
        """Note that its trainers begin to wait for others."""
        self._soon(STALL_S, STALL_S + 0.1, self._look_around)

    def _waits(self) -> bool:
        acts = any(worker.acts for worker in self.workers.values())
        return acts and self.sim.training.waited_s(self._known) >= STALL_S

    def _look_around(self) -> None:
        """Probe the other nodes as long as any node needs the result."""
        if self.follows:
            self.publish()
            self.carry_on()
            return
        waits = self._waits()
        due = self._probing.due(self.view, waits=waits, now_s=self.sim.now_s)
        if due:
            ask_all(self, due, then=self._answered)
        self.publish()
        wants = waits or self._probing.unreachable or is_wondering(self.view)
        if wants and not self._looks_around:
            self._looks_around = True
            self.after(_LOOK_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._looks_around = False
        self._look_around()

    def _answered(self, names: frozenset[str]) -> None:
        self._probing.answered(names, now_s=self.sim.now_s)
        self._look_around()

    # -- the decisions -------------------------------------------------------------------------

    def carry_on(self) -> None:
        """Bring the node to the state that the view requires."""
        self._deciding = None
        if self._lease is None:
            return
        if self.view.outcome:
            for worker in self.workers.values():
                worker.kill("job ended")
            return
        self._follow_seating()
        self._enter()
        if not self.follows:
            if is_wondering(self.view) and not self._looks_around:
                self._look_around()
            if self.view.number > self._fencing and stalled(self.view):
                self._fence(self.view.number, "all ranks wait for each other")
            self._seat()
        self._decide()
        self._take_part()

    def _take_part(self) -> None:
        """Choose whether to watch or to follow, and tell followers what a decider does."""
        now_s, lease = self.sim.now_s, self._lease
        place, again_s = self._part.choose(
            self.view, own=self._record, leaves=False, waits=self._waits(), now_s=now_s
        )
        if place is not None and lease is not None:
            decider = self._part.decider
            self._calls.make(
                f"claim {place}",
                lambda: self.sim.claim(place, decider, lease),
                lambda result: self.notice(),
            )
        if again_s is not None:
            self._again(again_s - now_s)
        if self.follows is self._part.watches:
            self.notice()
        if self.follows:
            return
        bulletin, again_s = self._part.due(
            self.view,
            fencing=self._fencing,
            halting=self._halting,
            reason=self._why,
            now_s=now_s,
        )
        if bulletin is not None:
            key = bulletin_key(self.sim.run_id)
            self._set(key, encode(bulletin), self.view.bulletin_revision)
        if again_s is not None:
            self._again(again_s - now_s)

    def _follow_seating(self) -> None:
        orders = {order.seat: order for order in seating.assigned(self.view.seating, self.name)}
        for seat in [seat for seat in self.workers if seat not in orders]:
            self.workers.pop(seat).kill("seat moved")
            self.publish()
        for order in orders.values():
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
        if not self._part.decides(self.view):
            return
        if not self.view.deciders and self.name not in list(self.view.nodes)[:_SEATERS]:
            return
        decision, reason = seating.seat(
            self.view,
            progress=self.sim.progress,
            max_attempts=self.sim.config.max_attempts,
            expect_nodes=self.sim.config.expect_nodes if self.sim.now_s < 5 else 0,
        )
        if isinstance(decision, seating.SeatExhausted):
            self._finish(JobOutcome(ok=False, message=reason))
        elif isinstance(decision, seating.ChangeSeats):
            self._set(seating_key(self.sim.run_id), encode(decision.seats), decision.expected)

    def _decision(self) -> tuple[agree.Decision, str]:
        now_s = self.sim.now_s
        stand = self.standing_generation == self.view.number > 0
        if self.follows:
            return deciding.follow(self.view, own=self._record(), stand=stand)
        self._seen = agree.observe(self.view, self._seen, now_s=now_s)
        trains = any(worker.acts for worker in self.workers.values())
        return agree.decide(
            self.view,
            self._seen,
            node=self.name,
            now_s=now_s,
            stand=stand,
            step_s=HALT_S if trains else agree.STEP_S,
        )

    def _decide(self) -> None:
        now_s = self.sim.now_s
        decision, reason = self._decision()
        self.sim.judge(self, decision, reason)
        match decision:
            case agree.Halt(generation=generation, until_s=until_s):
                self.halts = self._halting = generation
                self._why = reason
                if not self.follows:
                    self._again(until_s - now_s)
            case agree.FenceWorkers(generation=generation):
                self._fence(generation, reason)
            case agree.Propose(record=record, expected=expected):
                self._set(generation_key(self.sim.run_id), encode(record), expected)
            case agree.Finish(outcome=outcome):
                self._finish(outcome)
            case agree.Idle(until_s=until_s) | agree.WaitForFences(until_s=until_s):
                if until_s is not None:
                    self._again(until_s - now_s)

    def stand(self, generation: int) -> None:
        """Note that the trainers here halted at the end of a step, as `agree.Halt` requested."""
        self.standing_generation = generation
        self._soon(0.0, 0.005, self.carry_on)

    def _again(self, delay_s: float) -> None:
        due_s = self.sim.now_s + max(delay_s, 0.001)
        if self._deciding is None or due_s < self._deciding:
            self._deciding = due_s
            self._soon(due_s - self.sim.now_s, due_s - self.sim.now_s + 0.001, self.carry_on)

    def _set(self, key: str, value: str, expected: int) -> None:
        self._calls.make(
            f"set {key}",
            lambda: self.sim.compare_and_set(key, value, expected, by=self.name),
            lambda result: self.notice(),
        )

    def _finish(self, outcome: JobOutcome) -> None:
        self._set(outcome_key(self.sim.run_id), encode(outcome), 0)

    def _fence(self, generation: int, reason: str) -> None:
        if generation <= self._fencing:
            return
        self._fencing, self._why = generation, reason
        self.sim.log(f"{self.name} fences {generation}: {reason}")
        self.sim.tell(FencingBegun(node=self.name, generation=generation, reason=reason))
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
        """Once no worker acts any more, take the inventory, then publish the fence."""
        if generation != self._fencing or self.fenced >= generation:
            return
        if any(worker.acts for worker in self.workers.values()):
            return

        def take() -> None:
            if generation != self._fencing or self.fenced >= generation:
                return
            found = self.sidecar.inventory() if self.sidecar.alive else None
            self._inventory = compact(found, self.view.generation) if found else None
            self.fenced = generation
            self.sim.tell(FencingDone(node=self.name, generation=generation))
            self.publish()

        self._soon(0.001, 0.03, take)

    def hang(self, seat: str, *, lasts_s: float = 0.0) -> None:
        """Make a worker hang; the agent detects it after a delay.

        It continues after ``lasts_s``, unless that is 0 or it was killed meanwhile.
        """
        worker = self.workers[seat]
        worker.hung = True
        if lasts_s:
            self.sim.schedule.after(lasts_s, partial(self._wake, worker))

        def found() -> None:
            if not worker.hung:
                return
            if worker.state is WorkerState.ACTIVE:
                worker.kill("hung")
                self._reap()
            elif worker.state in (WorkerState.STARTING, WorkerState.READY):
                self._soon(HANG_S, HANG_S + 0.1, found)

        self._soon(HANG_S, HANG_S + 0.1, found)

    def _wake(self, worker: SimulatedWorker) -> None:
        worker.hung = False
        if worker.active_in <= self._fencing:
            self._park(worker, self._fencing)
        if worker.acts:
            self.sim.training.woke(worker.active_in)
