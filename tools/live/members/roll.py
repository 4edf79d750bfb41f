"""The roll of a job: its nodes, workers, ranks and plans by the coordinator's records. Pure.

The records have no times and no past. So a time is the reader's, and the plans before the first
look are not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from holdfast.elastic.membership.records import (
    TRAINER,
    GenerationRecord,
    NodeRecord,
    Setback,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView, newest_worker, role_of, seat_order
from holdfast.elastic.planning.holdoff import why_held_off
from holdfast.tools.live.view import JobState, NodeState, NodeView, RecoveryView, SeatView

MOST_PLANS: Final = 60
_MOST_GONE: Final = 1024
_NEVER: Final = Setback(losses=0)
_OVER: Final = (WorkerState.DONE, WorkerState.DEAD)


class Roll(msgspec.Struct, frozen=True, kw_only=True):
    """A job by the records of its coordinator.

    ``nodes`` are all that are there or were lost, by name, ``members`` the names of those with a
    rank in the newest generation. ``plans`` are the generations that the reader saw, the newest
    first. ``message`` is that of the job's outcome.
    """

    run: str
    state: JobState
    message: str = ""
    generation: int = 0
    world: int = 0
    wanted: dict[str, int] = {}
    nodes: tuple[NodeView, ...] = ()
    plans: tuple[RecoveryView, ...] = ()
    members: frozenset[str] = frozenset()


@dataclass(slots=True)
class GoneNode:
    """A node whose record is gone: since when, and why."""

    state: NodeState
    why: str
    since_s: float | None
    losses: int = 1


@dataclass(slots=True)
class RollCall:
    """Makes the rolls of one job, and remembers nodes that went and plans that were followed."""

    _before: JobView | None = None
    _gone: dict[str, GoneNode] = field(default_factory=dict)
    _losses: dict[str, int] = field(default_factory=dict)
    _plans: dict[int, RecoveryView] = field(default_factory=dict)

    def take(self, view: JobView, *, now_s: float) -> Roll:
        """Return the roll of a newer view, which is seen at ``now_s`` (seconds since 1970)."""
        before, self._before = self._before, view
        if before is not view:
            self._note_gone(before, view, now_s=now_s)
            self._note_plan(before, view, now_s=now_s)
        record = view.generation
        outcome = view.outcome
        state = _state(view)
        return Roll(
            run=view.run,
            state=state,
            message=outcome.message if outcome else "",
            generation=view.number,
            world=len(record.members) if record else 0,
            wanted=dict(view.wanted),
            nodes=tuple(self._nodes(view)),
            plans=tuple(self._told_plans(state)),
            members=frozenset(member.node for member in record.members) if record else frozenset(),
        )

    def _note_gone(self, before: JobView | None, view: JobView, *, now_s: float) -> None:
        known = {} if before is None else before.nodes
        for name in known.keys() - view.nodes.keys():
            if view.outcome is not None:
                self._gone[name] = GoneNode("idle", "the job is over", now_s, losses=0)
                continue
            if known[name].leaving:
                self._gone[name] = GoneNode("left", "it left after a notice", now_s, losses=0)
                continue
            self._losses[name] = self._losses.get(name, 0) + 1
            self._gone[name] = GoneNode("lost", "its lease ended", now_s)
        record = view.generation
        if record and before is None:
            for name in {*record.nodes, *record.setbacks} - view.nodes.keys():
                self._gone[name] = GoneNode("lost", "it has no lease", None)
        for name in self._gone.keys() & view.nodes.keys():
            del self._gone[name]
        while len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]

    def _note_plan(self, before: JobView | None, view: JobView, *, now_s: float) -> None:
        record = view.generation
        if record is None or record.number in self._plans:
            return
        old = before.generation if before else None
        plan = _plan(record, old, now_s=now_s)
        self._plans[record.number] = msgspec.structs.replace(plan, dated=before is not None)
        while len(self._plans) > MOST_PLANS:
            del self._plans[min(self._plans)]

    def _told_plans(self, state: JobState) -> Iterable[RecoveryView]:
        for number in sorted(self._plans, reverse=True):
            over = state == "training" or number < max(self._plans)
            yield msgspec.structs.replace(self._plans[number], over=over)

    def _nodes(self, view: JobView) -> Iterable[NodeView]:
        setbacks = view.generation.setbacks if view.generation else {}
        for name in sorted({*view.nodes, *self._gone}):
            losses = max(self._losses.get(name, 0), setbacks.get(name, _NEVER).losses)
            if (record := view.nodes.get(name)) is not None:
                yield _node(view, record, losses=losses)
            else:
                gone = self._gone[name]
                yield NodeView(
                    node=name,
                    state=gone.state,
                    why=gone.why,
                    since_s=gone.since_s,
                    losses=max(losses, gone.losses),
                )


def _state(view: JobView) -> JobState:
    if view.outcome is not None:
        return "done" if view.outcome.ok else "failed"
    if view.generation is None:
        return "starting"
    active = {
        worker.incarnation for _, worker in view.workers() if worker.state is WorkerState.ACTIVE
    }
    ranks = view.generation.members
    return "training" if all(each.incarnation in active for each in ranks) else "recovering"


def _plan(record: GenerationRecord, old: GenerationRecord | None, *, now_s: float) -> RecoveryView:
    """Return a generation as a plan; ``old`` is the one before, None if it was not seen."""
    restore = record.restore
    how = ""
    if restore is not None:
        how = "parity" if any(source.rebuilt for source in restore.sources) else "memory"
    nodes, seats, joined = _changes(record, old)
    cause = "start" if record.number == 1 else "change"
    if nodes or seats:
        cause = "loss"
    elif joined:
        cause = "join"
    return RecoveryView(
        generation=record.number,
        cause=cause,
        victims=tuple(nodes + seats) or tuple(joined),
        causes=(*(["node_lost"] if nodes else ()), *(["exit"] if seats else ())),
        at_s=now_s,
        proposed_s=now_s,
        ranks=len(record.members),
        restore_step=restore.step if restore else None,
        restore_how=how,
        tier="none",
        reason=record.reason,
    )


def _changes(
    record: GenerationRecord, old: GenerationRecord | None
) -> tuple[list[str], list[str], list[str]]:
    """Return the nodes and the seats that were lost since ``old``, and the nodes that joined."""
    if old is None or old.number + 1 != record.number:
        return [], [], []
    lost = sorted(name for name, mark in old.nodes.items() if record.nodes.get(name) != mark)
    go_on = {member.incarnation for member in record.members}
    seats = [
        member.seat
        for member in old.members
        if member.incarnation not in go_on and member.node not in lost
    ]
    return lost, seats, sorted(record.nodes.keys() - old.nodes.keys())


def _node(view: JobView, record: NodeRecord, *, losses: int) -> NodeView:
    ranks = _ranks(view, record)
    workers = [
        worker
        for seat in sorted({each.seat for each in record.workers}, key=seat_order)
        if (worker := newest_worker(record, seat)) is not None
    ]
    state, why = _node_state(view, record, workers, ranks)
    return NodeView(
        node=record.node,
        state=state,
        why=why,
        losses=losses,
        seats=tuple(
            SeatView(
                seat=worker.seat,
                role=role_of(worker.seat),
                pid=worker.pid,
                attempt=worker.attempt,
                alive=worker.state not in _OVER,
                rank=ranks.get(worker.seat),
            )
            for worker in workers
        ),
        troubles=tuple(f"it does not reach {other}" for other in sorted(record.unreachable)),
    )


def _ranks(view: JobView, record: NodeRecord) -> dict[str, int]:
    """Return the ranks of a node's workers by seat, of those that the newest generation means."""
    mine = {worker.incarnation for worker in record.workers if worker.state not in _OVER}
    members = view.generation.members if view.generation else ()
    return {
        member.seat: member.rank
        for member in members
        if member.node == record.node and member.incarnation in mine
    }


def _node_state(
    view: JobView, record: NodeRecord, workers: list[WorkerRecord], ranks: dict[str, int]
) -> tuple[NodeState, str]:
    trainers = [worker for worker in workers if role_of(worker.seat) == TRAINER]
    if view.outcome is not None or not trainers:
        return "idle", "the job is over" if view.outcome else "no trainer runs here"
    if all(worker.state is WorkerState.DONE for worker in trainers):
        return "idle", "its trainers are done"
    ended = next((each for each in trainers if each.state is WorkerState.DEAD), None)
    if ended is not None:
        return "restoring", f"{ended.seat} ended ({ended.ending}) and starts again"
    if not ranks and (why := why_held_off(view, record.node)):
        return "held off", why
    if not ranks and any(each.state is WorkerState.STARTING for each in trainers):
        return "restoring", "its trainers start"
    if not ranks:
        return "spare", "its trainers wait for a rank"
    taking_part = [each for each in trainers if each.seat in ranks]
    if any(each.state is not WorkerState.ACTIVE for each in taking_part):
        return "restoring", f"generation {view.number} has not got its state yet"
    notice = "it has a notice: it hands over, and leaves"
    return "training", notice if record.leaving else ""
