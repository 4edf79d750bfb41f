"""Moves of workers between roles: which seat becomes which, and when its worker ends. Pure.

Rank 0 measures who waits for whom and asks for other numbers of workers (`RoleAsk`). A move takes
the last seat of one role and makes the next seat of the other, on the same node and in the same
slot. It changes the seating alone. The generation ends by itself: a trainer that is ready joins,
and one without a seat is left out, both at the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from holdfast.elastic.decisions.leaving import LINGER_S
from holdfast.elastic.decisions.validity import is_stale, worker_of
from holdfast.elastic.membership.incremental import once, while_same
from holdfast.elastic.membership.records import (
    TRAINER,
    RoleAsk,
    Seating,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView, role_of, seat_order, slot_of

NOWHERE = ""
"""Node of a seat that waits for a free slot; the seat keeps its count of attempts."""

_AT_WORK = (WorkerState.READY, WorkerState.ACTIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A worker's place on ``node`` goes from the seat ``was`` to the seat ``becomes``.

    ``ask`` says why; None if the place goes back to its own role.
    """

    was: str
    becomes: str
    node: str
    ask: RoleAsk | None = None


Moved = tuple[tuple[Seating, ...], tuple[Move, ...], str]
"""The seating after moves, the moves, and the reason."""


def move(view: JobView, *, progress: int = -1) -> Moved | None:
    """Return the moves that are due in a view without any other change of the seating, or None.

    If a role has fewer workers than it needs and no slot is left, places that were moved away from
    it go back, one by one. Otherwise the ask of rank 0 is followed, if it is of the newest
    generation and only exchanges workers of two roles, no role is left with fewer than it needs,
    and no other change is under way: every seat has a worker at work, no worker is without a seat,
    no node leaves, and the generation can continue.
    """
    if not view.seating or view.outcome:
        return None
    if _is_waited(view):
        return _given_back(view, progress=progress) if _lent_out(view) else None
    ask = _ask(view)
    if ask is None or (exchange := _exchange(view, ask)) is None or not _is_quiet(view):
        return None
    source, target, count = exchange
    return _moved(view, source, target, count=count, ask=ask, progress=progress)


@while_same(lambda view: (view.seating,))
def _is_waited(seats: tuple[Seating, ...]) -> bool:
    """Return whether some seat waits for a free slot."""
    return any(not order.node for order in seats)


@while_same(lambda view: (view.seating,))
def _lent_out(seats: tuple[Seating, ...]) -> frozenset[str]:
    """Return the roles of which a seat waits, while other roles have places of theirs."""
    waiting = frozenset(slot_of(order) for order in seats if not order.node)
    return waiting & {order.slot for order in seats}


def least_of(view: JobView, role: str) -> int:
    """Return the number of workers of a role without which the job does not go on."""
    if role != TRAINER:
        return 1
    specs = {id(worker.spec): worker.spec for _, worker in view.workers() if worker.spec}
    return max((spec.least for spec in specs.values()), default=1)


def leader_of(view: JobView) -> WorkerRecord | None:
    """Return the worker of rank 0 in the newest generation while it is registered."""
    if view.generation is None or not view.generation.members:
        return None
    first = view.generation.members[0]
    home = view.nodes.get(first.node)
    return None if home is None else worker_of(home, first)


def _ask(view: JobView) -> RoleAsk | None:
    leader = leader_of(view)
    ask = leader.asks if leader else None
    return ask if ask is not None and ask.generation == view.number and ask.roles else None


def _exchange(view: JobView, ask: RoleAsk) -> tuple[str, str, int] | None:
    """Return which role gives how many workers to which, None if the ask cannot be followed."""
    wanted = {role: count for role, count in view.wanted.items() if count}
    if ask.roles.keys() != wanted.keys() or sum(ask.roles.values()) != sum(wanted.values()):
        return None
    more = {role: ask.roles[role] - wanted[role] for role in wanted}
    changed = sorted((count, role) for role, count in more.items() if count)
    if len(changed) != 2 or any(ask.roles[role] < least_of(view, role) for _, role in changed):
        return None
    (_, source), (count, target) = changed
    return source, target, count


def _is_quiet(view: JobView) -> bool:
    """Return whether every seat has a worker at work, every worker a seat, and nobody leaves."""
    if is_stale(view) or any(node.leaving for node in view.nodes.values()):
        return False
    seats = {order.seat: order for order in view.seating}
    found = 0
    for node, worker in view.workers():
        order = seats.get(worker.seat)
        if order is None or (order.node, order.attempt) != (node.node, worker.attempt):
            return False
        if worker.state not in _AT_WORK:
            return False
        found += 1
    return found == len(seats)


def _given_back(view: JobView, *, progress: int) -> Moved | None:
    """Return a place to the role that it was taken from, if that role cannot go on without it."""
    seated: dict[str, int] = {}
    for order in view.seating:
        if order.node in view.nodes:
            role = role_of(order.seat)
            seated[role] = seated.get(role, 0) + 1
    for role in sorted(_lent_out(view)):
        if seated.get(role, 0) >= least_of(view, role):
            continue
        for other in sorted({role_of(order.seat) for order in view.seating if order.slot == role}):
            if _last(view.seating, other)[-1].slot == role:
                return _moved(view, other, role, count=1, ask=None, progress=progress)
    return None


def _last(seats: Iterable[Seating], role: str) -> list[Seating]:
    """Return the seats of a role in order."""
    found = [order for order in seats if role_of(order.seat) == role]
    return sorted(found, key=lambda order: seat_order(order.seat))


def _moved(
    view: JobView, source: str, target: str, *, count: int, ask: RoleAsk | None, progress: int
) -> Moved:
    """Return the seating in which the last ``count`` places of ``source`` are ``target``'s.

    The last one goes first: so the last seats of a role are those in slots of others.
    """
    first = len(_last(view.seating, target))
    taken = _last(view.seating, source)[-count:][::-1]
    attempts = _attempts(view)
    added, moves = [], []
    for number, old in enumerate(taken, first):
        seat, slot = f"{target}/{number}", slot_of(old)
        added.append(
            Seating(
                seat=seat,
                node=old.node,
                attempt=attempts.get(seat, 0) + bool(old.node),
                progress=progress,
                slot="" if slot == target else slot,
            )
        )
        moves.append(Move(was=old.seat, becomes=seat, node=old.node, ask=ask))
    gone = {order.seat for order in taken}
    seats = [order for order in view.seating if order.seat not in gone]
    seats = sorted([*seats, *added], key=lambda order: seat_order(order.seat))
    why = ask.why if ask else f"{target} has too few workers and no free slot"
    clauses = [
        f"{each.was} on {each.node or 'a lost node'} becomes {each.becomes}" for each in moves
    ]
    return tuple(seats), tuple(moves), f"{', '.join(clauses)}: {why}"


def _attempts(view: JobView) -> Mapping[str, int]:
    """Return the newest attempt of every seat of which a worker is registered."""
    found: dict[str, int] = {}
    for _, worker in view.workers():
        found[worker.seat] = max(found.get(worker.seat, 0), worker.attempt)
    return found


# -- the workers whose seats are gone ---------------------------------------------------------


@while_same(lambda view: (view.seating,))
def all_seats(seats: tuple[Seating, ...]) -> Mapping[str, int]:
    """Return every seat of the job with its newest attempt."""
    return {order.seat: order.attempt for order in seats}


def _is_over(seats: Mapping[str, int], worker: WorkerRecord) -> bool:
    return seats.get(worker.seat, worker.attempt + 1) > worker.attempt


@once
def moved_away(view: JobView) -> dict[str, str]:
    """Return the members of the newest generation whose seat is gone, each with a clause.

    They act until the generation ends. It should end if the others can go on without them.
    """
    if view.generation is None or not view.seating:
        return {}
    seats, found = all_seats(view), {}
    for member in view.generation.members:
        home = view.nodes.get(member.node)
        worker = None if home is None else worker_of(home, member)
        if worker is not None and _is_over(seats, worker):
            found[member.incarnation] = f"{member.seat} on {member.node} moves to another role"
    return found


def dismissed(view: JobView, seats: Iterable[str]) -> frozenset[str]:
    """Return those of ``seats`` that no node has any more, because their workers were moved."""
    known = all_seats(view)
    return frozenset(seat for seat in seats if seat not in known) if known else frozenset()


class Farewell(Enum):
    """The next action of an agent with a worker whose seat is gone."""

    WAIT = auto()
    HAND_OVER = auto()
    END = auto()


def farewell(role: str, state: WorkerState, *, handed: bool, since_s: float) -> Farewell:
    """Return the next action with a worker of ``role`` that was dismissed ``since_s`` seconds ago.

    A trainer acts until its generation ends. A worker of another role hands over what it is at work
    on (``handed``: it has), in `leaving.LINGER_S` at most.
    """
    if role == TRAINER:
        return Farewell.WAIT if state is WorkerState.ACTIVE else Farewell.END
    if state not in _AT_WORK or handed or since_s >= LINGER_S:
        return Farewell.END
    return Farewell.HAND_OVER
