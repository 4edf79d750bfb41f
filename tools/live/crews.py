"""The nodes of a run and their workers: who lives, who has a rank, who was lost. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.elastic.events import (
    Detected,
    Event,
    FaultInjected,
    GenerationProposed,
    JobStarted,
    NodeExited,
    NodeLeaving,
    NodeReachable,
    RoleMoved,
    SidecarFailed,
    SidecarStarted,
    StateRestored,
    StepDone,
    WorkerExited,
    WorkerStarted,
)
from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of, seat_order
from holdfast.tools.live.view import NodeState, NodeView, SeatView
from holdfast.tools.show.node_status import NodeStatus

_LOSSES: Final = {"node_lost": "its lease ended", "lease_lost": "it lost its lease"}
_NEVER: Final = -math.inf


@dataclass(slots=True)
class Worker:
    """A seat's newest process on one node."""

    seat: str
    role: str
    pid: int = 0
    attempt: int = 0
    started_s: float = _NEVER
    exited_s: float = _NEVER
    ending: str = ""
    moved_s: float = _NEVER
    step: int = -1
    generation: int = 0
    restored: int = 0
    restored_s: float = _NEVER

    def has_state(self, generation: int, time_s: float) -> None:
        """Note that it has, or had, the state of a generation."""
        self.restored = max(self.restored, generation)
        self.restored_s = max(self.restored_s, time_s)

    @property
    def alive(self) -> bool:
        """True if it started, and its end was not told since."""
        return self.started_s > self.exited_s

    @property
    def is_gone(self) -> bool:
        """True if it ended since its place moved to another role."""
        return not self.alive and self.moved_s > self.started_s


@dataclass(slots=True)
class Machine:
    """A node as its own events and those of others tell it."""

    node: str
    workers: dict[str, Worker] = field(default_factory=dict)
    heard_s: float = _NEVER
    lost_s: float = _NEVER
    lost_why: str = ""
    losses: int = 0
    left_s: float = _NEVER
    left_why: str = ""
    sidecar_s: float = _NEVER
    failed_s: float = _NEVER
    failed_why: str = ""
    unreached: dict[str, tuple[float, str]] = field(default_factory=dict)

    def lose(self, time_s: float, why: str) -> None:
        """Note that the node was lost; several witnesses of one loss count once."""
        if time_s > self.heard_s or not math.isfinite(self.lost_s):
            self.losses += not self.lost_s > self.heard_s
        if time_s > self.lost_s:
            self.lost_s, self.lost_why = time_s, why

    @property
    def is_lost(self) -> bool:
        """True if nothing was heard of the node since its loss."""
        return self.lost_s >= self.heard_s and math.isfinite(self.lost_s)

    @property
    def has_left(self) -> bool:
        """True if it left after a notice and did not come back."""
        return self.left_s > self.sidecar_s


class Crews:
    """Folds the events that tell of nodes and workers."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self._generation = 0
        self._proposed_s = _NEVER
        self._ranks: dict[str, int] = {}

    def step(self, event: StepDone) -> None:
        """Take over a step of any rank; the most frequent of all events."""
        machine = self._machine(event.node)
        machine.heard_s = max(machine.heard_s, event.time_s)
        worker = self._worker(machine, event.seat)
        if event.generation >= worker.generation:
            worker.step = max(
                event.step, worker.step if event.generation == worker.generation else -1
            )
            worker.generation = event.generation
            worker.has_state(event.generation, event.time_s)

    def apply(self, event: Event) -> None:
        """Take over an event of any kind but `StepDone`."""
        match event:
            case JobStarted(nodes=nodes):
                for name in nodes:
                    self._machine(name)
            case WorkerStarted() if event.seat:
                self._started(event)
            case WorkerExited() if event.seat:
                worker = self._worker(self._machine(event.node), event.seat)
                if event.pid == worker.pid or not worker.pid:
                    worker.exited_s = max(worker.exited_s, event.time_s)
                    worker.ending = event.status
            case StateRestored() if event.seat:
                worker = self._worker(self._machine(event.node), event.seat)
                worker.has_state(event.generation, event.time_s)
            case GenerationProposed(generation=generation) if generation >= self._generation:
                self._generation, self._proposed_s = generation, event.time_s
                self._ranks = {seat: rank for rank, seat in enumerate(event.ranks)}
            case _:
                self._nodes_changed(event)
        if event.source in ("worker", "agent") and event.node in self.machines:
            machine = self.machines[event.node]
            machine.heard_s = max(machine.heard_s, event.time_s)

    def _nodes_changed(self, event: Event) -> None:
        match event:
            case NodeExited(victim=victim):
                kept = "its snapshots are kept" if event.memory_kept else "its memory is gone"
                self._machine(victim).lose(event.time_s, f"{event.status}; {kept}")
            case Detected(what=what, victim=victim) if what in _LOSSES:
                self._machine(victim).lose(event.time_s, event.why or _LOSSES[what])
            case Detected(what="unreachable", victim=victim):
                self._machine(victim).unreached[event.node] = (event.time_s, event.why)
            case NodeReachable(victim=victim):
                self._machine(victim).unreached.pop(event.node, None)
            case FaultInjected(on=on, victim=victim) if on and victim == on:
                self._machine(on).lose(event.time_s, f"fault injected: {event.what}")
            case RoleMoved(was=was, on=on) if on:
                self._worker(self._machine(on), was).moved_s = event.time_s
            case NodeLeaving(reason=reason):
                machine = self._machine(event.node)
                machine.left_s, machine.left_why = max(machine.left_s, event.time_s), reason
            case SidecarStarted():
                machine = self._machine(event.node)
                machine.sidecar_s = max(machine.sidecar_s, event.time_s)
            case SidecarFailed(error=error):
                machine = self._machine(event.node)
                machine.failed_s, machine.failed_why = event.time_s, error

    def _started(self, event: WorkerStarted) -> None:
        worker = self._worker(self._machine(event.node), event.seat)
        if event.time_s < worker.started_s:
            return
        worker.pid, worker.attempt, worker.started_s = event.pid, event.attempt, event.time_s
        worker.ending = ""

    def _machine(self, name: str) -> Machine:
        if (found := self.machines.get(name)) is None:
            found = self.machines[name] = Machine(name)
        return found

    def _worker(self, machine: Machine, seat: str) -> Worker:
        if (found := machine.workers.get(seat)) is None:
            found = machine.workers[seat] = Worker(seat, role_of(seat))
        return found

    # -- view ------------------------------------------------------------------------------------

    def heard(self) -> frozenset[str]:
        """Return the nodes that told events of their own."""
        found = self.machines.items()
        return frozenset(name for name, machine in found if math.isfinite(machine.heard_s))

    def nodes(
        self,
        statuses: Mapping[str, NodeStatus],
        *,
        rollouts: Mapping[str, Mapping[str, int]],
        is_over: bool,
    ) -> tuple[NodeView, ...]:
        """Return all nodes by name.

        ``rollouts`` gives for seats the ``tokens``, ``samples`` and ``version``.
        """
        here = self._places()
        names = sorted({*self.machines, *statuses} - {""}, key=_by_number)
        return tuple(
            self._node(
                self.machines.get(name) or Machine(name),
                statuses.get(name),
                here,
                rollouts=rollouts,
                is_over=is_over,
            )
            for name in names
        )

    def _places(self) -> dict[str, str]:
        """Return for each seat the node on which its newest process runs or ran."""
        newest: dict[str, tuple[float, str]] = {}
        for machine in self.machines.values():
            for seat, worker in machine.workers.items():
                newest[seat] = max(newest.get(seat, (_NEVER, "")), (worker.started_s, machine.node))
        return {seat: node for seat, (_, node) in newest.items()}

    def _node(
        self,
        machine: Machine,
        status: NodeStatus | None,
        here: Mapping[str, str],
        *,
        rollouts: Mapping[str, Mapping[str, int]],
        is_over: bool,
    ) -> NodeView:
        seats = tuple(
            self._seat(machine, worker, status, here, rollouts.get(worker.seat, {}))
            for worker in self._shown(machine, here)
        )
        held_off = status.held_off if status else ""
        state, why = self._state(machine, here, held_off, is_over=is_over)
        lost = state in ("lost", "left")
        view = NodeView(
            node=machine.node,
            state=state,
            why=why,
            since_s=machine.lost_s if state == "lost" else None,
            seats=seats,
            losses=machine.losses,
            troubles=() if lost else self._troubles(machine, status),
        )
        return view if status is None or lost or not status.status else _answered(view, status)

    def _shown(self, machine: Machine, here: Mapping[str, str]) -> Iterable[Worker]:
        """Yield the workers whose seats are on this node; of a lost one those that it had."""
        for seat in sorted(machine.workers, key=seat_order):
            if here.get(seat) == machine.node and not machine.workers[seat].is_gone:
                yield machine.workers[seat]

    def _seat(
        self,
        machine: Machine,
        worker: Worker,
        status: NodeStatus | None,
        here: Mapping[str, str],
        sampled: Mapping[str, int],
    ) -> SeatView:
        return SeatView(
            seat=worker.seat,
            role=worker.role,
            pid=worker.pid,
            attempt=worker.attempt,
            alive=worker.alive and not machine.is_lost,
            rank=self._ranks.get(worker.seat) if self._has_rank(worker) else None,
            step=worker.step if worker.step >= 0 else None,
            straggles=status.stragglers.get(worker.seat, "") if status else "",
            tokens=sampled.get("tokens"),
            samples=sampled.get("samples"),
            version=sampled.get("version"),
        )

    def _state(
        self,
        machine: Machine,
        here: Mapping[str, str],
        held_off: str,
        *,
        is_over: bool,
    ) -> tuple[NodeState, str]:
        if machine.is_lost and not is_over:
            return "lost", machine.lost_why
        if machine.has_left and not is_over:
            return "left", machine.left_why
        mine = [each for each in self._shown(machine, here) if each.role == TRAINER]
        alive = [each for each in mine if each.alive]
        ranked = [each for each in alive if self._has_rank(each)]
        if is_over or not mine:
            return "idle", "the job is over" if is_over else "no trainer runs here"
        if not alive:
            ended = max(mine, key=lambda each: each.exited_s)
            return "restoring", f"{ended.seat} ended ({ended.ending}) and starts again"
        if held_off and not ranked:
            return "held off", held_off
        if not ranked:
            return "spare", "its trainers wait for a rank"
        if any(each.restored < self._generation for each in ranked):
            return "restoring", f"generation {self._generation} has not got its state yet"
        return "training", ""

    def _has_rank(self, worker: Worker) -> bool:
        """Say whether the process has a rank; one that started later may have an older one's seat.

        Its own events come first, as the clocks of nodes differ.
        """
        if worker.seat not in self._ranks:
            return False
        trains = worker.restored >= self._generation and worker.restored_s >= worker.started_s
        return trains or worker.started_s <= self._proposed_s

    def _troubles(self, machine: Machine, status: NodeStatus | None) -> tuple[str, ...]:
        found = status.troubles() if status else []
        found += [why or f"{by} does not reach it" for by, (_, why) in machine.unreached.items()]
        if machine.failed_s > machine.sidecar_s:
            found.append(f"its sidecar does not start: {machine.failed_why}")
        return tuple(dict.fromkeys(found))


def _answered(view: NodeView, status: NodeStatus) -> NodeView:
    """Return the view with the answer of the node's sidecar."""
    values = {name: getattr(view, name) for name in view.__struct_fields__}
    return NodeView(
        **values
        | {
            "answered": True,
            "generation": status.generation,
            "committed": status.step("committed"),
            "protected": status.step("protected"),
            "durable": status.step("durable"),
            "age_s": status.age_s,
            "slots_bytes": status.nbytes("slots"),
            "parity_bytes": status.nbytes("parity"),
            "logs_bytes": status.nbytes("logs"),
            "disk_bytes": status.nbytes("disk"),
            "budget_bytes": status.nbytes("budget"),
            "need_bytes": int(status.memory.get("need_bytes") or 0),
            "mode": str(status.memory.get("mode", "")),
        }
    )


def _by_number(name: str) -> tuple[str, int, str]:
    """Return a key that sorts ``node10`` after ``node9``."""
    text = name.rstrip("0123456789")
    digits = name[len(text) :]
    return text, int(digits) if digits else -1, name
