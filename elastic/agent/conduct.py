"""The conductor: carries out an agent's decisions on seating, fencing and generations.

This module decides nothing. `holdfast.elastic.decisions.seating.seat` and
`holdfast.elastic.decisions.agree.decide` decide from the view of the coordinator's keys. This
module carries the decisions out and publishes the results. These change the view, and the next
decisions follow.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable

from holdfast.ckpt.memory.records import Inventory
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.crew import Crew
from holdfast.elastic.agent.inbox import Inbox
from holdfast.elastic.agent.reach import Reach
from holdfast.elastic.agent.registry import Registry
from holdfast.elastic.agent.reporting import Reporter, public_roster
from holdfast.elastic.agent.sidecar import SidecarKeeper
from holdfast.elastic.coordinator.base import Entry, KeyEvent
from holdfast.elastic.decisions import agree, leaving, moving, seating
from holdfast.elastic.decisions.detect import stalled
from holdfast.elastic.decisions.part import AgentPart, Claim, Tell
from holdfast.elastic.decisions.restarting import Restarts, again
from holdfast.elastic.decisions.standing import where_ranks_wait
from holdfast.elastic.decisions.stragglers import Straggler, stragglers
from holdfast.elastic.events import (
    Detected,
    FencingBegun,
    FencingDone,
    GenerationProposed,
    JobSeated,
    NodeLeaving,
    NodeReachable,
    RoleMoved,
    SidecarFailed,
    SidecarStarted,
    StragglerFound,
    StragglerOver,
)
from holdfast.elastic.membership.following import following
from holdfast.elastic.membership.records import GenerationRecord, JobOutcome, NodeRecord
from holdfast.elastic.membership.view import JobView, identity, node_key
from holdfast.elastic.planning.inventories import compact
from holdfast.elastic.processes.node_sidecar import SidecarPlan

_PROGRESS_EVERY_S = 0.5
_NODES_WAIT_S = 10.0
_RETRY_S = 0.1
_COMPARE_EVERY_S = 1.0
_OWN_LOOK_S = 2.0
_STEPS_IN_STAGE = 10**12
"""More than any stage has: a protected step of a later stage is progress."""


class Conductor:
    """The node's part in the job; all methods run on the loop's thread."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        plan: SidecarPlan,
        inbox: Inbox,
        crew: Crew,
        reporter: Reporter,
        registry: Registry,
        reach: Reach,
    ) -> None:
        self._config, self._incarnation = config, uuid.uuid4().hex
        self._crew, self._reporter = crew, reporter
        self._registry, self._reach = registry, reach
        self.view = JobView(run=config.run, nodes={}, wanted=config.wanted)
        self._seen_view, self._follows = self.view, True
        self._part = AgentPart(
            config.node,
            incarnation=self._incarnation,
            expected=config.nodes,
            most=config.most_watchers,
        )
        self._own_look_s = 0.0
        self._started_s = time.monotonic()
        self._again_s: float | None = 0.0
        self._known = 0
        self._fenced = 0
        self._inventory: Inventory | None = None
        self._inventory_asked = False
        self.progress, self._base = -1, 0
        self._progress_asked_s = 0.0
        self._sidecar_restarts = Restarts()
        self._leave_by_s: float | None = None
        self._told_s = 0.0
        self._place = 0
        self._compared_s = 0.0
        self._stalls, self._stalled_at = 0, -1
        self._unreachable: dict[str, str] = {}
        self._fail_job_s = 0.0
        self.stragglers: dict[str, str] = {}
        self.failure = ""
        self.left = False
        self.unusable = False
        """True if the node should leave the job because it cannot keep a sidecar."""
        self.sidecar = SidecarKeeper(
            plan, inbox=inbox, events=self, stop_grace_s=config.timing.stop_grace_s
        )

    @property
    def watches(self) -> bool:
        """True if the agent is to see the records of all nodes, not only keys of the whole job."""
        return self._part.watches

    def look(self, entries: Iterable[Entry], *, whole: bool = True) -> None:
        """Take a new state of the run's keys; ``whole``: of all, not only those of the job."""
        config, same = self._config, whole is not self._follows
        self._follows = not whole
        self._take(
            JobView.from_entries(
                entries,
                run=config.run,
                wanted=config.wanted,
                before=self._seen_view if same else None,
            ),
            before=self.view if same else None,
        )

    def look_at_changes(self, events: Iterable[KeyEvent]) -> None:
        """Take changes of the keys of the last `look`, in order."""
        self._take(self._seen_view.after(events), before=self.view)

    def _take(self, view: JobView, *, before: JobView | None) -> None:
        self._seen_view = view
        self.view = following(view, self._record()) if self._follows else view
        self._again_s = 0.0
        if before is not None and not self._follows:
            self._note_losses(before)
            self._check_record(before)
        self._crew.tell(public_roster(self.view))

    def _check_record(self, before: JobView) -> None:
        """Ensure that the coordinator shows this node's record as it was published last."""
        node = self._config.node
        if shown := self.view.decoded.get(node_key(self._config.run, node)):
            self._registry.shown(shown[0])
        elif node in before.nodes:
            self._registry.forget()

    def _note_losses(self, before: JobView) -> None:
        lost = [name for name in before.nodes if name not in self.view.nodes]
        if self._speaks and not self.view.outcome:
            for name in lost:
                self._reporter.emit(Detected(what="node_lost", victim=name))

    def carry_on(self) -> None:
        """Bring the node to the state that the view requires, as far as possible now."""
        now_s = time.monotonic()
        self._enter()
        if self.sidecar.address:
            assigned = seating.assigned(self.view.seating, self._config.node)
            self._crew.follow(
                assigned,
                sidecar=self.sidecar.address,
                progress=self.progress,
                gone=moving.dismissed(self.view, self._crew.seats),
            )
        self._fail_job(now_s)
        if self.view.number > self._part.standing and self._crew.stand(self.view.number):
            self._part.standing = self.view.number
            self._again(now_s)
        if self._again_s is not None and now_s >= self._again_s:
            self._again_s = None
            if not self._follows and self._part.decides(self.view):
                self._seat(now_s)
            self._decide(now_s)
        self._look_around(now_s)
        self._break_stall()
        self._settle_fence()
        self._ask_progress(now_s)
        self._depart(now_s)
        self._compare(now_s)
        self._take_part(now_s)

    def _take_part(self, now_s: float) -> None:
        """Choose whether to watch or to follow, and tell followers what a decider does."""
        move, again_s = self._part.next_move(
            self.view,
            own=self._record,
            follows=self._follows,
            leaves=self._leave_by_s is not None,
            waits=self._part.is_crowd and self._waits(),
            now_s=now_s,
        )
        match move:
            case Claim(place=place, decider=decider):
                self._registry.claim(place, decider)
            case Tell(bulletin=bulletin, expected=expected):
                self._registry.tell(bulletin, expected=expected)
        self._again(again_s)
        if self._part.is_crowd and now_s >= self._own_look_s:  # it does not watch its own record
            self._own_look_s = now_s + _OWN_LOOK_S
            self._registry.look_at_own(self._config.node)

    def patience_s(self, now_s: float) -> float | None:
        """Return the time until the next decision is due without an input, None if none is due."""
        return None if self._again_s is None else max(0.0, self._again_s - now_s)

    @property
    def busy(self) -> bool:
        """True if an action is running that should be checked often."""
        under_way = self._part.fencing > self._fenced or not self.sidecar.address
        return under_way or self._leave_by_s is not None

    def _again(self, at_s: float | None) -> None:
        if at_s is not None:
            self._again_s = at_s if self._again_s is None else min(at_s, self._again_s)

    def _seat(self, now_s: float) -> None:
        waiting = now_s - self._started_s < _NODES_WAIT_S
        decision, reason = seating.seat(
            self.view,
            progress=self.progress,
            max_attempts=self._config.max_attempts,
            expect_nodes=self._config.nodes if waiting else 0,
        )
        match decision:
            case seating.ChangeSeats(seats=seats, expected=expected, moves=moves):
                beside = self.view if self._part.is_crowd else None
                if self._registry.seat(seats, expected=expected, beside=beside):
                    self._reporter.emit(JobSeated(reason=reason))
                    for each in moves:
                        self._reporter.emit(_role_moved(each, reason))
                self._again(now_s + _RETRY_S)
            case seating.SeatExhausted():
                self._finish(JobOutcome(ok=False, message=reason))
            case seating.Keep():
                if not self.view.seating_revision:
                    self._again(now_s + _RETRY_S)

    def _decide(self, now_s: float) -> None:
        step_s = self._crew.step_s(self.view.number)
        decision, reason = self._part.decide(
            self.view,
            own=self._record,
            follows=self._follows,
            now_s=now_s,
            step_s=agree.STEP_S if step_s is None else step_s,
        )
        match decision:
            case agree.Halt(generation=generation, until_s=until_s):
                self._part.begin_halt(generation, reason)
                self._crew.halt(generation)
                self._again(until_s)
            case agree.FenceWorkers(generation=generation):
                self._fence(generation, reason=reason)
            case agree.Propose(record=record, expected=expected):
                beside = self.view if self._part.is_crowd else None
                if self._registry.propose(record, expected=expected, beside=beside):
                    self._reporter.emit(_proposal(record, reason))
                self._again(now_s + _RETRY_S)
            case agree.Finish(outcome=outcome):
                self._finish(outcome)
            case agree.Idle(until_s=until_s) | agree.WaitForFences(until_s=until_s):
                self._again(until_s)

    def _fail_job(self, now_s: float) -> None:
        """End the job if the crew reports a failure.

        Retry until the coordinator has the outcome.
        """
        if (why := self._crew.job_failure) and not self.view.outcome and now_s >= self._fail_job_s:
            self._fail_job_s = now_s + _RETRY_S
            self._finish(JobOutcome(ok=False, message=why))

    def _finish(self, outcome: JobOutcome) -> None:
        """End the job for all nodes, unless it has ended already."""
        if not self._registry.finish(outcome):
            self._again(time.monotonic() + _RETRY_S)

    # -- entering and fencing generations -------------------------------------------------------

    def _enter(self) -> None:
        record = self.view.generation
        if record and record.number > self._known and self.sidecar.address:
            self._known = record.number
            self._base = record.snapshots.stage * _STEPS_IN_STAGE
            if record.restore:
                self.step_protected(record.restore.step)
            if self._config.node in record.nodes and record.number > self._part.fencing:
                self.sidecar.adopt(record)

    def generation_adopted(self, record: GenerationRecord) -> None:
        """See `SidecarEvents`."""
        if record.number > self._part.fencing:
            self._crew.begin(record)

    def _fence(self, generation: int, *, reason: str) -> None:
        if self._part.begin_fence(generation, reason):
            self._inventory_asked = False
            self._reporter.emit(FencingBegun(generation=generation, reason=reason))
            self._crew.fence(generation)
            self.sidecar.fence(generation)

    def _look_around(self, now_s: float) -> None:
        """Probe which nodes this node reaches if trainers are stuck.

        Report each unreachable node once.
        """
        if self._follows:
            return  # an agent whose node is stuck watches before it probes
        self._reach.look(self.view, waits=self._waits(), now_s=now_s)
        found = self._reach.probing.unreachable
        for name in sorted(found.keys() - self._unreachable.keys()):
            why = f"node {self._config.node} does not reach node {name}"
            self._reporter.emit(Detected(what="unreachable", victim=name, why=why))
        for name in sorted(self._unreachable.keys() - found.keys()):
            node = self.view.nodes.get(name)
            if node is not None and identity(node) == self._unreachable[name]:  # else it left
                self._reporter.emit(NodeReachable(victim=name))
        self._unreachable = found

    def _waits(self) -> bool:
        return self._known > self._part.fencing and self._crew.waits(self._known)

    def _break_stall(self) -> None:
        """Start a new generation with the same workers if all ranks wait for each other.

        After ``max_attempts`` such stalls in a row without a newly protected step, end the job.
        """
        number = self.view.number
        if self._follows or number <= self._part.fencing:
            return
        if self._config.node not in self.view.nodes or not stalled(self.view):
            return
        self._stalls = 1 if self.progress > self._stalled_at else self._stalls + 1
        self._stalled_at = self.progress
        why = f"all ranks of generation {number} wait for each other"
        where = f": {found}" if (found := where_ranks_wait(self.view)) else ""
        if self._stalls >= self._config.max_attempts:
            self._finish(
                JobOutcome(
                    ok=False,
                    message=f"{why}, for the {self._stalls}. time without a newly protected step"
                    + (
                        where
                        or ": do all ranks call the same collectives in the same order? the events "
                        "'stack' show the stack of each"
                    ),
                )
            )
            return
        if self._speaks:
            self._reporter.emit(Detected(what="stall", victim="trainers", why=why + where))
        self._fence(number, reason=why + where)

    @property
    def _speaks(self) -> bool:
        """True if this node reports events that all nodes see."""
        return not self._follows and self._part.speaks(self.view)

    def _settle_fence(self) -> None:
        """Request the inventory as soon as no worker acts in the fenced generation any more."""
        if self._part.fencing == self._fenced or self._inventory_asked or not self.sidecar.address:
            return
        if self._crew.parked(self._part.fencing):
            self._inventory_asked = True
            self.sidecar.take_inventory(self._part.fencing)

    def inventory_taken(self, inventory: Inventory, *, generation: int) -> None:
        """See `SidecarEvents`."""
        if generation == self._part.fencing:
            record = self.view.generation
            known = record if record and record.number == generation else None
            self._fenced, self._inventory = generation, compact(inventory, known)
            self._reporter.emit(FencingDone(generation=generation))

    def _compare(self, now_s: float) -> None:
        """Report each straggler once; one node reports for all."""
        if now_s - self._compared_s < _COMPARE_EVERY_S:
            return
        self._compared_s = now_s
        found = {each.seat: each for each in stragglers(self.view)} if self._speaks else {}
        for seat, each in found.items():
            if seat not in self.stragglers:
                self._reporter.emit(_straggler(each))
        for seat in self.stragglers if self._speaks else ():
            if seat not in found:
                self._reporter.emit(StragglerOver(victim=seat))
        self.stragglers = {seat: str(each) for seat, each in found.items()}

    # -- leaving on notice -----------------------------------------------------------------------

    def notice(self, why: str, *, grace_s: float) -> None:
        """Accept a notice that the node goes away in ``grace_s``: hand over, then leave."""
        if self._leave_by_s is None:
            self._told_s = time.monotonic()
            self._leave_by_s = self._told_s + grace_s
            self._place = 0 if self._follows else leaving.place(self.view)
            self._reporter.emit(
                Detected(what="notice", victim=self._config.node, why=why, grace_s=grace_s)
            )

    def _depart(self, now_s: float) -> None:
        if self._leave_by_s is None or self.left:
            return
        self._crew.tell_others()
        if self._follows and self._leave_by_s - now_s > leaving.RUSH_S:
            return  # first it has to see who else leaves
        self._place = self._place or leaving.place(self.view)
        decision, reason = leaving.depart(
            self.view,
            node=self._config.node,
            handed=self._crew.handed(self.view.number),
            since_s=now_s - self._told_s,
            due_s=self._leave_by_s - now_s,
            others=self._crew.others(),
        )
        match decision:
            case leaving.HandOver():
                self._crew.hand_over()
            case leaving.Leave():
                self.left = True
                self._reporter.emit(NodeLeaving(reason=reason))

    def withdraw(self) -> None:
        """Let the others continue without this node; its workers must have ended."""
        for place, decider in self.view.deciders.items():
            if decider == self._part.decider:
                self._registry.resign(place)
        self._registry.withdraw(self._config.node)

    # -- the sidecar -----------------------------------------------------------------------------

    def sidecar_started(self) -> None:
        """See `SidecarEvents`."""
        self._inventory_asked, self.failure = False, ""
        self._reporter.emit(SidecarStarted(pid=self.sidecar.pid, address=self.sidecar.address))

    def sidecar_ended(self, *, pid: int) -> None:
        """See `SidecarEvents`."""
        victim = f"{self._config.node}/sidecar"
        self._reporter.emit(Detected(what="sidecar_exit", victim=victim, pid=pid))
        self._start_sidecar_again("its sidecar ended again and again; see its log")

    def sidecar_failed(self, error: Exception) -> None:
        """See `SidecarEvents`."""
        self._reporter.emit(SidecarFailed(error=str(error)))
        self._start_sidecar_again(f"its sidecar does not start: {error}")

    def _start_sidecar_again(self, why: str) -> None:
        """Set when the next sidecar is due; a node that cannot keep one is useless to the job."""
        restarts = again(
            self._sidecar_restarts,
            progress=self.progress,
            most=self._config.max_attempts,
            now_s=time.monotonic(),
        )
        self.failure = why
        if restarts is None:
            self.unusable = True
            return
        self._sidecar_restarts, self.sidecar.due_s = restarts, restarts.due_s

    def _ask_progress(self, now_s: float) -> None:
        active = self._known > self._part.fencing
        if active and now_s - self._progress_asked_s > _PROGRESS_EVERY_S:
            self._progress_asked_s = now_s
            self.sidecar.ask_progress(self._known)

    def step_protected(self, step: int) -> None:
        """See `SidecarEvents`."""
        self.progress = max(self.progress, self._base + step)

    # -- the node's record ---------------------------------------------------------------------

    def publish(self) -> None:
        """Publish the node's present record."""
        if not self._registry.publish(self._record()):
            self._again(time.monotonic() + _RETRY_S)

    def _record(self) -> NodeRecord:
        stands = self._crew.stands(self._known)
        return NodeRecord(
            node=self._config.node,
            incarnation=self._incarnation,
            domain=self._config.domain,
            sidecar=self.sidecar.address,
            slots=self._config.slots,
            workers=self._crew.table.records(),
            fenced=self._fenced,
            inventory=self._inventory,
            sidecar_starts=self.sidecar.starts,
            leaving=self._place,
            stalled=self._known if self._crew.stalled(self._known) else 0,
            standing=self._known if stands else 0,
            stands=stands,
            unreachable=self._reach.probing.unreachable,
            probed=0 if self._follows else self._reach.probing.probed(self.view),
        )


def _proposal(record: GenerationRecord, reason: str) -> GenerationProposed:
    restore = record.restore
    how = "none"
    if restore:
        how = "parity" if any(source.rebuilt for source in restore.sources) else "memory"
    return GenerationProposed(
        generation=record.number,
        ranks=tuple(member.seat for member in record.members),
        restore_step=restore.step if restore else None,
        restore_how=how,
        reason=reason,
    )


def _role_moved(found: moving.Move, reason: str) -> RoleMoved:
    ask, was, becomes = found.ask, found.was, found.becomes
    if ask is None:
        return RoleMoved(was=was, becomes=becomes, on=found.node, why=reason)
    return RoleMoved(
        was=was,
        becomes=becomes,
        on=found.node,
        why=ask.why,
        waits=ask.waits,
        works=ask.works,
        step_s=ask.step_s,
        expected_s=ask.expected_s,
    )


def _straggler(found: Straggler) -> StragglerFound:
    return StragglerFound(
        seat=found.seat,
        victim=found.seat,
        on=found.node,
        why=str(found),
        times=found.times,
        microbatch_s=found.microbatch_s,
        others_s=found.others_s,
        waits=found.waits,
        data=found.data,
        busy=found.busy,
        computes=found.computes,
    )
