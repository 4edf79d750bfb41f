"""A simulated agent without processes: production decisions, with effects on virtual time.

It does the work of `holdfast.elastic.agent` around the decisions, with every delay, lost reply and
stale view that real agents meet: reads and writes take time and fail while the network is
disturbed, parking takes time, a hung worker is killed late, and a lease that cannot be renewed ends
the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.ckpt.memory.records import Inventory
from holdfast.elastic.decisions import agree, seating
from holdfast.elastic.decisions.detect import stalled
from holdfast.elastic.decisions.part import AgentPart, Claim, Tell
from holdfast.elastic.decisions.probing import Probing
from holdfast.elastic.events import FencingBegun, FencingDone, SidecarStarted
from holdfast.elastic.membership.differences import Divisible
from holdfast.elastic.membership.divided import divided
from holdfast.elastic.membership.following import following
from holdfast.elastic.membership.records import JobOutcome, NodeRecord, WorkerState
from holdfast.elastic.membership.view import (
    JobView,
    bulletin_key,
    encode,
    generation_key,
    outcome_key,
    seating_key,
)
from holdfast.elastic.planning.inventories import compact
from holdfast.elastic.planning.reach import is_wondering
from holdfast.elastic.testing.simulation.calls import CoordinatorCalls
from holdfast.elastic.testing.simulation.crew import SimulatedCrew
from holdfast.elastic.testing.simulation.job_keys import SimulatedJobKeys, set_divided
from holdfast.elastic.testing.simulation.network import COORDINATOR
from holdfast.elastic.testing.simulation.probes import ask_all
from holdfast.elastic.testing.simulation.registration import SimulatedRegistration
from holdfast.elastic.testing.simulation.sidecar import SimulatedSidecar

if TYPE_CHECKING:
    from holdfast.elastic.testing.simulation.simulator import Simulation

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
        self.crew = SimulatedCrew(self)
        self.sidecar_starts = 0
        self.sidecar: SimulatedSidecar
        self.fenced = 0
        self.view = JobView(run=sim.run_id, nodes={}, wanted=sim.config.wanted)
        self.part = AgentPart(
            name,
            incarnation=self.incarnation,
            expected=sim.config.nodes,
            most=sim.config.most_watchers,
            places=sim.config.deciders,
        )
        self.follows = not self.part.watches
        self._inventory: Inventory | None = None
        self._known = 0
        self._probing = Probing(name)
        self._looks_around = False
        self.calls = CoordinatorCalls(self)
        self._registration = SimulatedRegistration(self, self.calls)
        self._job_keys = SimulatedJobKeys(self, self._heard)
        self._reading = False
        self._deciding: float | None = None
        self._paused = False
        self._missed: list[Callable[[], None]] = []
        self._start_sidecar()
        self._registration.register()
        self._registration.beat()
        self.notice()

    # -- time ----------------------------------------------------------------------------------

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` after ``delay_s`` if the agent still lives then; if paused, on resume."""
        self.sim.schedule.after(delay_s, lambda: self._do(act))

    def soon(self, least_s: float, most_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` as `after` does, after a random delay between the bounds."""
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
        self.crew.kill("node lost")

    def kill_worker(self, seat: str, ending: str = "killed") -> None:
        """Kill one worker; the agent detects it within milliseconds."""
        self.crew.workers[seat].kill(ending)
        self.soon(0.001, 0.01, self.reap)

    def kill_sidecar(self) -> None:
        """Kill the sidecar with its memory; the agent starts another."""
        self.sidecar.end()
        self.soon(0.1, 0.5, self._start_sidecar)

    def pause(self) -> None:
        """Stop the agent; its workers act only until the time that its lease allows."""
        if self._paused:
            return
        self._paused = True
        left_s = max(self._registration.acts_until_s - self.sim.now_s, 0.0)
        self.sim.schedule.after(left_s, self._end_overdue)

    def _end_overdue(self) -> None:
        overdue = self.sim.now_s >= self._registration.acts_until_s
        if self.alive and self._paused and overdue:
            self.crew.kill("its agent is stopped")

    def resume(self) -> None:
        """Let it continue, with everything that it missed; cancel a planned crash at a call."""
        self.calls.cancel_crash()
        missed, self._missed, self._paused = self._missed, [], False
        for act in missed:
            self.sim.schedule.soon(0.0, 0.002, lambda act=act: self._do(act))  # type: ignore[misc]
        self.soon(0.0, 0.002, self.reap)

    def reap(self) -> None:
        """Publish that workers have ended, and a fence that waited for them."""
        self.settle(self.part.fencing)
        self.publish()

    def lose_lease(self) -> None:
        """End the workers: the node has no lease any more."""
        for worker in self.crew.workers.values():
            if worker.state is not WorkerState.DEAD:
                worker.kill("lease lost")
        self.reap()

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

    def notice(self) -> None:
        """Handle a change at the coordinator: read it after a delay."""
        if not self._reading and self.alive:
            self._reading = True
            self._read()

    def _read(self) -> None:
        copies = () if self.sim.is_out else self.sim.network.fate(COORDINATOR, self.name)
        least_s, most_s = self.sim.config.notice_s
        if copies:
            self.soon(least_s + min(copies), most_s + min(copies), self._look)
        else:
            self.after(_READ_RETRY_S, self._read)

    def _look(self) -> None:
        self._reading = False
        self.follows = not self.part.watches
        if self.follows:
            self._job_keys.read()
            return
        self._job_keys.forget()
        view = self.sim.view()
        if view.revision >= self.view.revision:
            self.sim.looks["watcher"] += 1
            self.view = view
            self._registration.check(view)
            self.carry_on()

    def _heard(self, view: JobView) -> None:
        """Take a new state of the keys of the whole job."""
        if self.follows and view.revision >= self.view.revision:
            self.sim.looks["follower"] += 1
            self.view = following(view, self.record())
            self.carry_on()

    def publish(self) -> None:
        """Publish the node's record in its state at the time of the call."""
        self._registration.publish()

    def record(self) -> NodeRecord:
        """Return the node's present record."""
        return NodeRecord(
            node=self.name,
            incarnation=self.incarnation,
            domain=self.sim.domain_of(self.name),
            sidecar=self.sidecar.address if self.sidecar.alive else "",
            slots=self.slots,
            workers=tuple(w.record() for _, w in sorted(self.crew.workers.items())),
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
        self.soon(STALL_S, STALL_S + 0.1, self._look_around)

    def _waits(self) -> bool:
        return self.crew.acts and self.sim.training.waited_s(self._known) >= STALL_S

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
        if self._registration.lease is None:
            return
        if self.view.outcome:
            self.crew.kill("job ended")
            return
        self.crew.follow(self.view)
        self._enter()
        if not self.follows:
            if is_wondering(self.view) and not self._looks_around:
                self._look_around()
            if self.view.number > self.part.fencing and stalled(self.view):
                self._fence(self.view.number, "all ranks wait for each other")
            self._seat()
        self._decide()
        self._take_part()

    def _take_part(self) -> None:
        """Choose whether to watch or to follow, and tell followers what a decider does."""
        now_s, lease = self.sim.now_s, self._registration.lease
        move, again_s = self.part.next_move(
            self.view,
            own=self.record,
            follows=self.follows,
            leaves=False,
            waits=self._waits(),
            now_s=now_s,
        )
        match move:
            case Claim(place=place, decider=decider) if lease is not None:
                self.calls.make(
                    f"claim {place}",
                    lambda: self.sim.claim(place, decider, lease),
                    lambda result: self.notice(),
                )
            case Tell(bulletin=bulletin, expected=expected):
                self._set(bulletin_key(self.sim.run_id), encode(bulletin), expected)
        if again_s is not None:
            self._again(again_s - now_s)
        if self.follows is self.part.watches:
            self.notice()

    def _enter(self) -> None:
        record = self.view.generation
        if record is None or record.number <= max(self._known, self.part.fencing):
            return
        if self.name not in record.nodes or not self.sidecar.alive:
            return
        self._known = record.number
        self.sidecar.adopt(record.snapshots, restore=record.restore)
        self.crew.enter(record)
        self.publish()

    def _seat(self) -> None:
        if not self.part.decides(self.view):
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
            self.sim.judge_seats(self, decision)
            key, seats = seating_key(self.sim.run_id), decision.seats
            self._set_for_all(key, seats, decision.expected, before=self.view.seating)

    def _decide(self) -> None:
        now_s = self.sim.now_s
        decision, reason = self.part.decide(
            self.view,
            own=self.record,
            follows=self.follows,
            now_s=now_s,
            step_s=HALT_S if self.crew.acts else agree.STEP_S,
        )
        self.sim.judge(self, decision, reason)
        match decision:
            case agree.Halt(generation=generation, until_s=until_s):
                self.part.begin_halt(generation, reason)
                if not self.follows:
                    self._again(until_s - now_s)
            case agree.FenceWorkers(generation=generation):
                self._fence(generation, reason)
            case agree.Propose(record=record, expected=expected):
                key = generation_key(self.sim.run_id)
                self._set_for_all(key, record, expected, before=self.view.generation)
            case agree.Finish(outcome=outcome):
                self._finish(outcome)
            case agree.Idle(until_s=until_s) | agree.WaitForFences(until_s=until_s):
                if until_s is not None:
                    self._again(until_s - now_s)

    def stand(self, generation: int) -> None:
        """Note that the trainers here halted at the end of a step, as `agree.Halt` requested."""
        self.part.standing = generation
        self.soon(0.0, 0.005, self.carry_on)

    def _again(self, delay_s: float) -> None:
        due_s = self.sim.now_s + max(delay_s, 0.001)
        if self._deciding is None or due_s < self._deciding:
            self._deciding = due_s
            self.soon(due_s - self.sim.now_s, due_s - self.sim.now_s + 0.001, self.carry_on)

    def _set(self, key: str, value: str, expected: int) -> None:
        self.calls.make(
            f"set {key}",
            lambda: self.sim.compare_and_set(key, value, expected, by=self.name),
            lambda result: self.notice(),
        )

    def _set_for_all(
        self, key: str, record: Divisible, expected: int, *, before: Divisible | None
    ) -> None:
        """Write a record that names all nodes, divided if most agents follow."""
        if not self.part.is_crowd:
            self._set(key, encode(record), expected)
            return
        found = divided(key, record, base=expected, before=before)
        set_divided(self, key, found, expected=expected)

    def _finish(self, outcome: JobOutcome) -> None:
        self._set(outcome_key(self.sim.run_id), encode(outcome), 0)

    def _fence(self, generation: int, reason: str) -> None:
        if not self.part.begin_fence(generation, reason):
            return
        self.sim.log(f"{self.name} fences {generation}: {reason}")
        self.sim.tell(FencingBegun(node=self.name, generation=generation, reason=reason))
        self.crew.park(generation)
        self.settle(generation)

    def settle(self, generation: int) -> None:
        """Once no worker acts any more, take the inventory, then publish the fence."""
        if generation != self.part.fencing or self.fenced >= generation:
            return
        if self.crew.acts:
            return

        def take() -> None:
            if generation != self.part.fencing or self.fenced >= generation:
                return
            found = self.sidecar.inventory() if self.sidecar.alive else None
            self._inventory = compact(found, self.view.generation) if found else None
            self.fenced = generation
            self.sim.tell(FencingDone(node=self.name, generation=generation))
            self.publish()

        self.soon(0.001, 0.03, take)
