"""The seating: placement of workers on nodes, and the response to dead workers. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heapreplace

import msgspec

from holdfast.elastic.decisions.moving import NOWHERE, Move, move
from holdfast.elastic.membership.incremental import by_node, by_nodes, once, while_same
from holdfast.elastic.membership.records import (
    TRAINER,
    NodeRecord,
    Seating,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import (
    JobView,
    newest_worker,
    role_of,
    seat_order,
    slot_of,
)

__all__ = [
    "NOWHERE",
    "ChangeSeats",
    "Keep",
    "SeatExhausted",
    "SeatingDecision",
    "assigned",
    "pending_trainers",
    "seat",
    "seated_at",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSeats:
    """Change the seating: compare-and-set ``seats`` against ``expected``.

    ``moves`` are the workers that thereby move between roles.
    """

    seats: tuple[Seating, ...]
    expected: int
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Keep the seating."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatExhausted:
    """A seat failed too often without progress, or as every retry would: end the job, not ok."""

    seat: str


SeatingDecision = ChangeSeats | Keep | SeatExhausted


def seat(
    view: JobView, *, progress: int = -1, max_attempts: int = 5, expect_nodes: int = 0
) -> tuple[SeatingDecision, str]:
    """Return the decision on which node runs which seat, and the reason.

    Seats stay where they are. A seat whose worker died goes to the same node with the next attempt;
    a seat whose node is gone goes to a live node with a free slot of its role (that with the fewest
    seats, then by name); if there is none it waits at `NOWHERE`. Seats of DONE workers are not
    filled again. ``progress`` is the newest protected step known to the caller (-1: none); a seat
    that failed ``max_attempts`` times in a row without a newer protected step is exhausted. So are
    all trainers as soon as each has ended with the same fault of the user's code, without a newer
    protected step: at the first time if no step was protected yet, else at the second. Before
    the first seating, ``expect_nodes`` live nodes are waited for, so that seats spread over all of
    them; the caller lowers it to 0 when it has waited long enough. While all workers are at work,
    one is moved to another role if rank 0 asks for that (`moving.move`).
    """
    if view.outcome:
        return Keep(), "the job has ended"
    if not view.seating_revision and len(view.nodes) < expect_nodes:
        return Keep(), f"{len(view.nodes)} of {expect_nodes} nodes have registered"
    if reason := _unchanged(view):
        return _moved(view, progress=progress) or (Keep(), reason)
    kept: dict[str, Seating] = {}
    reasons: list[str] = []
    last: WorkerRecord | None = None
    wanted, dead = _complete(view), _with_dead(view)
    for old in view.seating:
        if old.node in view.nodes and old.node not in dead and wanted:
            kept[old.seat] = old
        elif not _is_wanted(view, old.seat):
            reasons.append(f"{old.seat} is no longer wanted")
        elif old.node and old.node not in view.nodes:
            kept[old.seat] = msgspec.structs.replace(old, node=NOWHERE)
            reasons.append(f"{old.seat} lost its node {old.node}")
        elif (worker := _dead(view, old)) is None:
            kept[old.seat] = old
        elif (again := _retry(old, worker, progress=progress)).failures >= max_attempts:
            return SeatExhausted(seat=old.seat), _exhausted(again, worker)
        else:
            kept[old.seat], last = again, worker
            how = f" ({worker.ending})" if worker.ending else ""
            reasons.append(f"{old.seat} died on {old.node}{how}: attempt {again.attempt} there")
    if last is not None and _as_every_retry(view, kept, progress=progress):
        return SeatExhausted(seat=last.seat), _for_good(kept[last.seat], last)
    seats, placed = _place(view, kept, progress=progress)
    if seats == view.seating:
        return Keep(), _unseated(seats) or "every seat is taken"
    return ChangeSeats(seats=seats, expected=view.seating_revision), "; ".join(reasons + placed)


def _moved(view: JobView, *, progress: int) -> tuple[SeatingDecision, str] | None:
    if (found := move(view, progress=progress)) is None:
        return None
    seats, moves, reason = found
    return ChangeSeats(seats=seats, expected=view.seating_revision, moves=moves), reason


def assigned(seating: Collection[Seating], node: str) -> tuple[Seating, ...]:
    """Return the seats assigned to ``node``."""
    return tuple(order for order in seating if order.node == node)


def _unchanged(view: JobView) -> str | None:
    """Return why the seating stays, None if that needs a closer check; mostly it stays.

    It stays if every wanted seat is on a live node, or waits while there is no free slot for it,
    and no worker has died.
    """
    if _with_dead(view) or not _complete(view):
        return None
    seated = seated_at(view)
    if _away(view) - {NOWHERE}:
        return None
    waiting = seated.get(NOWHERE, ())
    if waiting:
        offered = {role for roles in _with_room(view).values() for role in roles}
        if not offered.isdisjoint(slot_of(order) for order in waiting):
            return None
    return _unseated(waiting) or "every seat is taken"


@by_nodes()
def _with_dead(nodes: Iterable[NodeRecord]) -> dict[str, bool]:
    """Return the nodes with a worker that is DEAD."""
    dead = WorkerState.DEAD
    return {node.node: True for node in nodes for worker in node.workers if worker.state is dead}


@while_same(lambda view: (view.seating, view.wanted))
def _complete(seats: tuple[Seating, ...], wanted: Mapping[str, int]) -> bool:
    """Return whether exactly the wanted seats exist, in the order in which they are stored."""
    return [order.seat for order in seats] == _in_order(tuple(sorted(wanted.items())))


@while_same(lambda view: (view.seating,))
def seated_at(seats: tuple[Seating, ...]) -> dict[str, tuple[Seating, ...]]:
    """Return the seats of every node; seats without a node are at `NOWHERE`."""
    found: dict[str, list[Seating]] = defaultdict(list)
    for order in seats:
        found[order.node].append(order)
    return {node: tuple(orders) for node, orders in found.items()}


@once
def _away(view: JobView) -> set[str]:
    """Return the nodes with a seat that are not live, including `NOWHERE`."""
    return seated_at(view).keys() - view.nodes.keys()


@while_same(lambda view: (view.seating,))
def _slots_taken(seats: tuple[Seating, ...]) -> dict[str, dict[str, int]]:
    """Return each node's number of taken slots of each role."""
    taken: dict[str, dict[str, int]] = {}
    for order in seats:
        at, role = taken.setdefault(order.node, {}), slot_of(order)
        at[role] = at.get(role, 0) + 1
    return taken


@by_nodes(lambda view: (_slots_taken(view),))
def _with_room(
    nodes: Iterable[NodeRecord], taken: Mapping[str, Mapping[str, int]]
) -> dict[str, tuple[str, ...]]:
    """Return each node's roles with a free slot."""
    found = {}
    for node in nodes:
        used = taken.get(node.node, {})
        if used != node.slots:  # mostly a node is full
            roles = tuple([role for role, slots in node.slots.items() if used.get(role, 0) < slots])
            if roles:
                found[node.node] = roles
    return found


@lru_cache(8)
def _in_order(wanted: tuple[tuple[str, int], ...]) -> list[str]:
    """Return the wanted seats in the order in which they are stored."""
    return [f"{role}/{i}" for role, count in wanted for i in range(count)]


@while_same(lambda view: (view.seating,))
def _seat_numbers(seating: tuple[Seating, ...]) -> dict[str, int]:
    return {order.seat: number for number, order in enumerate(seating)}


@by_node(lambda view: (seated_at(view),))
def _pending_seats(node: NodeRecord, seated: Mapping[str, Sequence[Seating]]) -> list[str] | None:
    """Return each node's trainer seats without a worker that has become READY."""
    found = []
    for order in seated.get(node.node, ()):
        if role_of(order.seat) == TRAINER:
            worker = newest_worker(node, order.seat)
            if worker is None or worker.state in (WorkerState.STARTING, WorkerState.DEAD):
                found.append(order.seat)
    return found or None


@once
def pending_trainers(view: JobView) -> dict[str, str]:
    """Return the seated trainers that are not READY yet, each with its node."""
    pending = {seat: node for node, seats in _pending_seats(view).items() for seat in seats}
    numbers = _seat_numbers(view)
    return {seat: pending[seat] for seat in sorted(pending, key=numbers.__getitem__)}


def _is_wanted(view: JobView, name: str) -> bool:
    return seat_order(name)[1] < view.wanted.get(role_of(name), 0)


def _dead(view: JobView, order: Seating) -> WorkerRecord | None:
    """Return the dead worker of exactly this attempt, None while it lives or has not started."""
    worker = view.worker_of(order)
    if worker and worker.attempt == order.attempt and worker.state is WorkerState.DEAD:
        return worker
    return None


def _retry(order: Seating, worker: WorkerRecord, *, progress: int) -> Seating:
    moved_on = progress > order.progress
    return Seating(
        seat=order.seat,
        node=order.node,
        attempt=order.attempt + 1,
        failures=1 if moved_on else order.failures + 1,
        progress=max(progress, order.progress),
        fault=worker.fault,
        slot=order.slot,
    )


def _as_every_retry(view: JobView, seats: Mapping[str, Seating], *, progress: int) -> bool:
    """Return whether all trainers ended with one fault, and none has moved on since.

    Before the first step nothing is lost by an end. Later, one more try shows that the fault does
    not come from what the workers had in memory.
    """
    trainers = [seats.get(f"{TRAINER}/{i}") for i in range(view.wanted.get(TRAINER, 0))]
    found = [order for order in trainers if order is not None]
    fault = found[0].fault if found else ""
    return (
        len(found) == len(trainers)
        and fault != ""
        and all(order.fault == fault and order.progress >= progress for order in found)
        and (progress <= 0 or all(order.failures > 1 for order in found))
    )


def _exhausted(order: Seating, worker: WorkerRecord) -> str:
    ending = f", the last time {worker.ending}" if worker.ending else ""
    return (
        f"{order.seat} failed {order.failures} times in a row on node {order.node} without a newly "
        f"protected step{ending}; see its output for the cause"
    )


def _for_good(order: Seating, worker: WorkerRecord) -> str:
    error = worker.ending.partition(": ")[2] or worker.ending
    often = (
        f"for the {order.failures}. time without a newly protected step"
        if order.progress > 0
        else "before any step was protected"
    )
    return (
        f"all trainers ended with the same error {often}: {error} ({worker.fault}). Another try "
        "would end as this one: mend the script and start the job again"
    )


@lru_cache(8)
def _seats_wanted(wanted: tuple[tuple[str, int], ...]) -> list[str]:
    """Return the wanted seats, trainers first, because trainers must spread over the nodes."""
    roles = sorted(wanted, key=lambda each: (each[0] != TRAINER, each[0]))
    return [f"{role}/{i}" for role, count in roles for i in range(count)]


def _place(
    view: JobView, kept: dict[str, Seating], *, progress: int
) -> tuple[tuple[Seating, ...], list[str]]:
    """Give every empty wanted seat a node with a free slot of its role, if there is one."""
    seats = dict(kept)
    wanted = tuple(sorted(view.wanted.items()))
    empty = [
        name
        for name in _seats_wanted(wanted)
        if (old := seats.get(name)) is None or old.node == NOWHERE
    ]
    reasons: list[str] = []
    room = _Room(view, kept if empty else {})
    for name in empty:
        old = seats.get(name) or Seating(seat=name, node=NOWHERE, attempt=0)
        if (node := room.take(slot_of(old))) is None:
            seats[name] = old
            continue
        seats[name] = msgspec.structs.replace(
            old, node=node, attempt=old.attempt + 1, progress=max(progress, old.progress)
        )
        reasons.append(f"{name} goes to {node}")
    if list(seats) == _in_order(wanted):
        return tuple(seats.values()), reasons
    return tuple(seats[name] for name in sorted(seats, key=seat_order)), reasons


class _Room:
    """The free slots of all nodes, those of the node with the fewest seats first."""

    def __init__(self, view: JobView, kept: Mapping[str, Seating]) -> None:
        taken = [order for order in kept.values() if order.node]
        self._nodes = view.nodes
        self._load = Counter([order.node for order in taken])
        self._used = Counter([(order.node, slot_of(order)) for order in taken])
        self._queues: dict[str, list[tuple[int, str]]] = {}

    def offers(self, role: str) -> list[tuple[int, str]]:
        """Return the nodes with a free slot of the role, each with the number of its seats."""
        used = self._used
        return [
            (self._load[name], name)
            for name, node in self._nodes.items()
            if used.get((name, role), 0) < node.slots.get(role, 0)
        ]

    def take(self, role: str) -> str | None:
        """Return the node for the next seat of the role, None if no slot is free."""
        queue = self._queues.get(role)
        if queue is None:
            queue = self._queues[role] = self.offers(role)
            heapify(queue)
        while queue:
            load, name = queue[0]
            if self._used[name, role] >= self._nodes[name].slots.get(role, 0):
                heappop(queue)
            elif load != self._load[name]:  # a seat of another role went there meanwhile
                heapreplace(queue, (self._load[name], name))
            else:
                self._load[name] += 1
                self._used[name, role] += 1
                heapreplace(queue, (load + 1, name))
                return name
        return None


def _unseated(seats: Collection[Seating]) -> str:
    empty = [order.seat for order in seats if not order.node]
    return f"no free slot for {', '.join(empty)}" if empty else ""
