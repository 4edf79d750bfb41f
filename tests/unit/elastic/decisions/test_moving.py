"""A worker moves between roles only while nothing else changes, and never takes the last of one."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from doubles import fakes

from holdfast.elastic.coordinator.base import Entry, EventKind, KeyEvent
from holdfast.elastic.decisions.agree import FenceWorkers, FirstSeen, Halt, Idle, decide, observe
from holdfast.elastic.decisions.leaving import LINGER_S
from holdfast.elastic.decisions.moving import (
    NOWHERE,
    Farewell,
    Move,
    dismissed,
    farewell,
    move,
    moved_away,
)
from holdfast.elastic.decisions.seating import ChangeSeats, Keep, seat
from holdfast.elastic.membership.readiness import outside_trainers, ready_trainers
from holdfast.elastic.membership.records import (
    JobSpec,
    NodeRecord,
    RoleAsk,
    Seating,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView, encode, seating_key, slot_of, with_moves

SLOTS = {"trainer": 1, "rollout": 1}
WANTED = {"trainer": 2, "rollout": 2}
ASK = RoleAsk(generation=1, roles={"trainer": 3, "rollout": 1}, reason="they wait")
BACK = RoleAsk(generation=1, roles={"trainer": 1, "rollout": 3}, reason="they wait")
SEATS = (
    Seating(seat="rollout/0", node="a", attempt=1),
    Seating(seat="rollout/1", node="b", attempt=1),
    Seating(seat="trainer/0", node="a", attempt=1),
    Seating(seat="trainer/1", node="b", attempt=1),
)


def job(
    ask: RoleAsk | None = ASK,
    *,
    seats: tuple[Seating, ...] = SEATS,
    spec: JobSpec | None = None,
    wanted: dict[str, int] = WANTED,
) -> JobView:
    """Return a job in its first generation: two trainers act, two other workers are ready."""
    nodes, ranks = [], []
    for name in "ab":
        trainer, other = f"trainer/{'ab'.index(name)}", f"rollout/{'ab'.index(name)}"
        acting = fakes.worker(trainer, WorkerState.ACTIVE, spec=spec)
        acting = msgspec.structs.replace(acting, asks=ask if name == "a" else None)
        ranks.append((name, acting))
        nodes.append(fakes.node(name, fakes.worker(other), acting, slots=SLOTS))
    record = fakes.generation(1, nodes, ranks=ranks)
    view = fakes.view(*nodes, generation=record, seating=seats, wanted=wanted)
    return replace(view, wanted=with_moves(wanted, seats), configured=wanted)


def with_node(view: JobView, record: NodeRecord) -> JobView:
    return replace(view, nodes={**view.nodes, record.node: record})


def seats_of(view: JobView) -> dict[str, tuple[str, int, str]]:
    decision, reason = seat(view)
    assert isinstance(decision, ChangeSeats), reason
    return {each.seat: (each.node, each.attempt, slot_of(each)) for each in decision.seats}


def test_the_last_seat_of_one_role_becomes_the_next_of_the_other_in_its_slot() -> None:
    decision, reason = seat(job())
    assert isinstance(decision, ChangeSeats)
    assert seats_of(job()) == {
        "rollout/0": ("a", 1, "rollout"),
        "trainer/0": ("a", 1, "trainer"),
        "trainer/1": ("b", 1, "trainer"),
        "trainer/2": ("b", 1, "rollout"),
    }
    assert decision.moves == (Move(was="rollout/1", becomes="trainer/2", node="b", ask=ASK),)
    assert reason == "rollout/1 on b becomes trainer/2: they wait; 0 s a step, 0 s expected"


def test_a_trainer_moves_the_same_way() -> None:
    assert seats_of(job(BACK))["rollout/2"] == ("b", 1, "trainer")


def test_a_place_that_moves_back_is_in_its_own_slot_again() -> None:
    seats = (*SEATS[:1], *SEATS[2:], Seating(seat="trainer/2", node="b", attempt=1, slot="rollout"))
    view = job(msgspec.structs.replace(ASK, roles=WANTED), seats=seats)
    view = with_node(
        view,
        msgspec.structs.replace(
            view.nodes["b"], workers=(fakes.worker("trainer/1"), fakes.worker("trainer/2"))
        ),
    )
    record = fakes.generation(
        1,
        list(view.nodes.values()),
        ranks=[("a", view.nodes["a"].workers[1]), *(("b", w) for w in view.nodes["b"].workers)],
    )
    found = seats_of(replace(view, generation=record))
    assert found["rollout/1"] == ("b", 1, "rollout")
    assert "trainer/2" not in found


@pytest.mark.parametrize(
    "ask",
    [
        None,
        msgspec.structs.replace(ASK, generation=2),
        msgspec.structs.replace(ASK, roles={}),
        msgspec.structs.replace(ASK, roles=WANTED),
        msgspec.structs.replace(ASK, roles={"trainer": 4, "rollout": 0}),
        msgspec.structs.replace(ASK, roles={"trainer": 0, "rollout": 4}),
        msgspec.structs.replace(ASK, roles={"trainer": 3, "rollout": 2}),
        msgspec.structs.replace(ASK, roles={"trainer": 4}),
        msgspec.structs.replace(ASK, roles={"trainer": 2, "rollout": 1, "other": 1}),
    ],
)
def test_other_asks_change_nothing(ask: RoleAsk | None) -> None:
    assert seat(job(ask)) == (Keep(), "every seat is taken")


def test_as_many_trainers_stay_as_the_job_needs() -> None:
    assert isinstance(seat(job(BACK, spec=JobSpec(min_dp=2)))[0], Keep)
    assert isinstance(seat(job(BACK, spec=JobSpec(min_dp=1)))[0], ChangeSeats)


def test_nothing_moves_while_a_worker_starts() -> None:
    view = job()
    starting = fakes.worker("rollout/1", WorkerState.STARTING)
    b = view.nodes["b"]
    view = with_node(view, msgspec.structs.replace(b, workers=(starting, b.workers[1])))
    assert isinstance(seat(view)[0], Keep)


def test_nothing_moves_while_a_worker_has_no_seat_yet_or_no_more() -> None:
    view = job()
    b = view.nodes["b"]
    more = msgspec.structs.replace(b, workers=(*b.workers, fakes.worker("trainer/2")))
    assert isinstance(seat(with_node(view, more))[0], Keep)
    fewer = msgspec.structs.replace(b, workers=b.workers[1:])
    assert isinstance(seat(with_node(view, fewer))[0], Keep)


def test_nothing_moves_while_a_node_leaves_or_the_generation_ends() -> None:
    view = job()
    leaving = msgspec.structs.replace(view.nodes["b"], leaving=1)
    assert isinstance(seat(with_node(view, leaving))[0], Keep)
    fenced = msgspec.structs.replace(view.nodes["b"], fenced=1)
    assert isinstance(seat(with_node(view, fenced))[0], Keep)


MOVED = (
    *SEATS[:2],
    Seating(seat="rollout/2", node="b", attempt=1, slot="trainer"),
    *SEATS[2:3],
)


def test_a_trainer_without_a_seat_leaves_at_the_end_of_a_step() -> None:
    view = job(None, seats=MOVED)
    seen = observe(view, FirstSeen(), now_s=10.0)
    assert list(moved_away(view).values()) == ["trainer/1 on b moves to another role"]
    early, _ = decide(view, seen, node="a", now_s=10.1)
    assert isinstance(early, Idle)
    assert early.until_s == 10.5
    halt, reason = decide(view, observe(view, seen, now_s=10.6), node="a", now_s=10.6)
    assert isinstance(halt, Halt)
    assert reason == "trainer/1 on b moves to another role"
    late, _ = decide(view, observe(view, seen, now_s=100.0), node="a", now_s=100.0)
    assert isinstance(late, FenceWorkers)


def test_it_stays_while_the_others_could_not_go_on() -> None:
    view = job(None, seats=MOVED, spec=JobSpec(min_dp=2))
    seen = observe(view, FirstSeen(), now_s=0.0)
    assert isinstance(decide(view, seen, node="a", now_s=100.0)[0], Idle)


def test_it_is_no_part_of_the_next_generation_and_does_not_join_again() -> None:
    view = job(None, seats=MOVED)
    for name in "ab":
        workers = tuple(
            msgspec.structs.replace(each, state=WorkerState.READY, ready_after=1)
            for each in view.nodes[name].workers
        )
        view = with_node(view, msgspec.structs.replace(view.nodes[name], workers=workers, fenced=1))
    assert [worker.seat for _, worker in ready_trainers(view)] == ["trainer/0"]
    a = view.nodes["a"]
    later = fakes.generation(2, list(view.nodes.values()), ranks=[("a", a.workers[1])])
    assert outside_trainers(replace(view, generation=later)) == []


def test_a_role_that_lost_its_last_worker_gets_its_slot_back() -> None:
    """Both trainer slots were on two nodes; one gave its slot away, the other is lost."""
    seats = (*MOVED[:2], MOVED[2], msgspec.structs.replace(SEATS[2], node=NOWHERE))
    seats = (msgspec.structs.replace(seats[0], node=NOWHERE), *seats[1:])
    view = job(None, seats=seats)
    workers = (fakes.worker("rollout/1"), fakes.worker("rollout/2"))
    left = msgspec.structs.replace(view.nodes["b"], workers=workers)
    view = replace(view, nodes={"b": left})
    found = move(view)
    assert found is not None
    decided, moves, reason = found
    assert [(each.seat, each.node) for each in decided] == [
        ("rollout/0", NOWHERE),
        ("rollout/1", "b"),
        ("trainer/0", NOWHERE),
        ("trainer/1", "b"),
    ]
    assert moves == (Move(was="rollout/2", becomes="trainer/1", node="b"),)
    assert reason == (
        "rollout/2 on b becomes trainer/1: trainer has too few workers and no free slot"
    )
    assert all(order.slot == "" for order in decided)
    assert move(replace(view, seating=decided)) is None


def test_a_seat_that_comes_back_has_a_newer_attempt_than_its_last_worker() -> None:
    view = job(None, seats=MOVED)
    away = replace(view, nodes={"b": view.nodes["b"]})
    seats = (msgspec.structs.replace(MOVED[0], node=NOWHERE), *MOVED[1:3])
    seats = (*seats, msgspec.structs.replace(SEATS[2], node=NOWHERE))
    found = move(replace(away, seating=seats))
    assert found is not None
    assert found[0][-1] == Seating(seat="trainer/1", node="b", attempt=2)


def test_a_moved_seat_keeps_its_slot_when_its_worker_dies_or_its_node_is_lost() -> None:
    view = job(None, seats=MOVED)
    dead = fakes.worker("rollout/2", WorkerState.DEAD)
    b = view.nodes["b"]
    died = with_node(view, msgspec.structs.replace(b, workers=(b.workers[0], dead)))
    assert seats_of(died)["rollout/2"] == ("b", 2, "trainer")
    lost = replace(view, nodes={"a": view.nodes["a"]})
    assert seats_of(lost)["rollout/2"] == (NOWHERE, 1, "trainer")
    back = replace(lost, seating=seat(lost)[0].seats)  # type: ignore[union-attr]
    back = with_node(back, fakes.node("b", slots=SLOTS))
    assert seats_of(back)["rollout/2"] == ("b", 2, "trainer")


def test_the_numbers_of_workers_follow_the_seats() -> None:
    assert with_moves(WANTED, SEATS) is WANTED
    assert with_moves(WANTED, MOVED) == {"trainer": 1, "rollout": 3}
    start = JobView(run="r", nodes={}, wanted=WANTED)
    key = seating_key("r")
    view = JobView.from_entries(
        [Entry(key=key, value=encode(MOVED), revision=4)], run="r", wanted=WANTED, before=start
    )
    assert (view.wanted, view.configured) == ({"trainer": 1, "rollout": 3}, WANTED)
    same = view.after([])
    assert same.wanted is view.wanted
    undone = same.after([KeyEvent(kind=EventKind.PUT, key=key, value=encode(SEATS), revision=5)])
    assert undone.wanted is WANTED


def test_only_seats_that_no_node_has_are_gone() -> None:
    view = job(None, seats=MOVED)
    assert dismissed(view, ["trainer/0", "trainer/1", "rollout/1"]) == {"trainer/1"}
    assert dismissed(JobView(run="r", nodes={}, wanted=WANTED), ["trainer/0"]) == frozenset()


@pytest.mark.parametrize(
    ("role", "state", "handed", "since_s", "expected"),
    [
        ("trainer", WorkerState.ACTIVE, False, 1e6, Farewell.WAIT),
        ("trainer", WorkerState.READY, False, 0.0, Farewell.END),
        ("trainer", WorkerState.STARTING, False, 0.0, Farewell.END),
        ("rollout", WorkerState.STARTING, False, 0.0, Farewell.END),
        ("rollout", WorkerState.READY, False, 0.0, Farewell.HAND_OVER),
        ("rollout", WorkerState.READY, True, 0.0, Farewell.END),
        ("rollout", WorkerState.READY, False, LINGER_S, Farewell.END),
        ("rollout", WorkerState.DONE, False, 0.0, Farewell.END),
    ],
)
def test_a_worker_without_a_seat_ends_once_that_costs_nothing(
    role: str, state: WorkerState, handed: bool, since_s: float, expected: Farewell
) -> None:
    assert farewell(role, state, handed=handed, since_s=since_s) is expected
