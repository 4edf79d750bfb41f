"""Seating is sticky: a seat restarts on its node, and moves if the node is gone."""

from __future__ import annotations

import msgspec
from doubles import fakes

from holdfast.elastic.decisions.seating import (
    NOWHERE,
    ChangeSeats,
    Keep,
    SeatExhausted,
    assigned,
    seat,
)
from holdfast.elastic.membership.records import JobOutcome, NodeRecord, Seating, WorkerState
from holdfast.elastic.membership.view import JobView

SLOTS = {"trainer": 1, "rollout": 1}
WANTED = {"trainer": 2, "rollout": 2}


def abc(**nodes: NodeRecord) -> list[NodeRecord]:
    return [nodes.get(name) or fakes.node(name, slots=SLOTS) for name in "abc"]


def order(name: str, node: str, attempt: int = 1, **more: int) -> Seating:
    return Seating(seat=name, node=node, attempt=attempt, **more)


SEATED = (
    order("rollout/0", "c"),
    order("rollout/1", "a"),
    order("trainer/0", "a"),
    order("trainer/1", "b"),
)


def seated(view: JobView, **options: int) -> dict[str, tuple[str, int]]:
    decision, reason = seat(view, **options)
    assert isinstance(decision, ChangeSeats), reason
    assert decision.expected == view.seating_revision
    return {each.seat: (each.node, each.attempt) for each in decision.seats}


def test_first_seating_spreads_trainers_first() -> None:
    view = fakes.view(*abc(), wanted=WANTED)
    assert seated(view) == {
        "trainer/0": ("a", 1),
        "trainer/1": ("b", 1),
        "rollout/0": ("c", 1),
        "rollout/1": ("a", 1),
    }


def test_first_seating_waits_for_the_expected_nodes() -> None:
    view = fakes.view(*abc()[:2], wanted=WANTED)
    decision, reason = seat(view, expect_nodes=3)
    assert isinstance(decision, Keep)
    assert reason == "2 of 3 nodes have registered"
    assert seated(view, expect_nodes=2)


def test_seating_that_fits_stands() -> None:
    assert seat(fakes.view(*abc(), seating=SEATED, wanted=WANTED)) == (
        Keep(),
        "every seat is taken",
    )


def test_dead_worker_is_started_again_on_its_node() -> None:
    dead = fakes.worker("trainer/1", WorkerState.DEAD, ending="killed by SIGKILL")
    view = fakes.view(*abc(b=fakes.node("b", dead, slots=SLOTS)), seating=SEATED, wanted=WANTED)
    decision, reason = seat(view)
    assert isinstance(decision, ChangeSeats)
    assert decision.seats[-1] == order("trainer/1", "b", 2, failures=1)
    assert reason == "trainer/1 died on b (killed by SIGKILL): attempt 2 there"


def test_dead_worker_of_an_older_attempt_changes_nothing() -> None:
    dead = fakes.worker("trainer/1", WorkerState.DEAD, attempt=1)
    seats = (*SEATED[:-1], order("trainer/1", "b", 2))
    view = fakes.view(*abc(b=fakes.node("b", dead, slots=SLOTS)), seating=seats, wanted=WANTED)
    assert isinstance(seat(view)[0], Keep)


def test_done_worker_is_not_started_again() -> None:
    done = fakes.worker("trainer/1", WorkerState.DONE)
    view = fakes.view(*abc(b=fakes.node("b", done, slots=SLOTS)), seating=SEATED, wanted=WANTED)
    assert isinstance(seat(view)[0], Keep)


def test_seat_of_a_lost_node_moves_to_a_free_slot() -> None:
    nodes = [n for n in abc() if n.node != "b"]
    view = fakes.view(*nodes, seating=SEATED, wanted=WANTED)
    assert seated(view)["trainer/1"] == ("c", 2)


def test_seat_without_a_free_slot_waits_and_keeps_its_count() -> None:
    nodes = [n for n in abc() if n.node == "a"]
    view = fakes.view(*nodes, seating=SEATED, wanted=WANTED)
    decision, _ = seat(view)
    assert isinstance(decision, ChangeSeats)
    waiting = [each for each in decision.seats if each.node == NOWHERE]
    assert [each.seat for each in waiting] == ["rollout/0", "trainer/1"]

    still = fakes.view(*nodes, seating=decision.seats, wanted=WANTED)
    assert seat(still) == (Keep(), "no free slot for rollout/0, trainer/1")

    # b is back with the record of the old, dead worker: the new attempt is not taken for it
    old = fakes.worker("trainer/1", WorkerState.DEAD, attempt=1)
    back = fakes.view(
        nodes[0], fakes.node("b", old, slots=SLOTS), seating=decision.seats, wanted=WANTED
    )
    assert seated(back)["trainer/1"] == ("b", 2)


def test_seats_no_longer_wanted_are_dropped() -> None:
    view = fakes.view(*abc(), seating=SEATED, wanted={"trainer": 1, "rollout": 1})
    assert set(seated(view)) == {"trainer/0", "rollout/0"}


def test_seat_is_exhausted_after_failures_without_progress() -> None:
    seats = SEATED
    for attempt in range(1, 6):
        dead = fakes.worker("trainer/1", WorkerState.DEAD, attempt=attempt, ending="exit 1")
        nodes = abc(b=fakes.node("b", dead, slots=SLOTS))
        decision, reason = seat(fakes.view(*nodes, seating=seats, wanted=WANTED), progress=7)
        if attempt < 5:
            assert isinstance(decision, ChangeSeats)
            seats = decision.seats
    assert decision == SeatExhausted(seat="trainer/1")
    assert "failed 5 times in a row" in reason
    assert "exit 1" in reason


def ended(faults: dict[str, str], seats: tuple[Seating, ...] = SEATED) -> JobView:
    """Return a view in which the trainers of ``faults`` have just ended with these."""
    attempts = {each.seat: each.attempt for each in seats}
    nodes = {
        node: fakes.node(
            node,
            msgspec.structs.replace(
                fakes.worker(name, WorkerState.DEAD, attempt=attempts[name]),
                fault=faults[name],
                ending="exit status 1: KeyError: 'vocab'",
            ),
            slots=SLOTS,
        )
        for name, node in (("trainer/0", "a"), ("trainer/1", "b"))
        if name in faults
    }
    return fakes.view(*abc(**nodes), seating=seats, wanted=WANTED)


FAULT = "KeyError at train.py:8"
BOTH = {"trainer/0": FAULT, "trainer/1": FAULT}


def test_a_fault_of_all_trainers_before_the_first_step_ends_the_job() -> None:
    decision, reason = seat(ended(BOTH), progress=0)
    assert isinstance(decision, SeatExhausted)
    assert "all trainers ended with the same error before any step was protected" in reason
    assert "KeyError: 'vocab' (KeyError at train.py:8)" in reason


def test_it_does_so_if_one_trainer_is_seen_to_end_before_the_other() -> None:
    first, _ = seat(ended({"trainer/0": FAULT}))
    assert isinstance(first, ChangeSeats)
    assert isinstance(seat(ended({"trainer/1": FAULT}, first.seats))[0], SeatExhausted)


def test_a_fault_of_one_trainer_or_of_different_lines_is_retried() -> None:
    assert isinstance(seat(ended({"trainer/0": FAULT}))[0], ChangeSeats)
    assert isinstance(seat(ended({"trainer/0": "", "trainer/1": ""}))[0], ChangeSeats)
    differ = {"trainer/0": FAULT, "trainer/1": "KeyError at train.py:9"}
    assert isinstance(seat(ended(differ))[0], ChangeSeats)


def test_a_fault_after_protected_steps_is_tried_once_more() -> None:
    first, _ = seat(ended(BOTH), progress=7)
    assert isinstance(first, ChangeSeats)
    again = ended(BOTH, first.seats)
    assert isinstance(seat(again, progress=8)[0], ChangeSeats), "it went on in between"
    decision, reason = seat(again, progress=7)
    assert isinstance(decision, SeatExhausted)
    assert "for the 2. time without a newly protected step" in reason


def test_progress_forgives_failures() -> None:
    seats = (*SEATED[:-1], order("trainer/1", "b", 5, failures=4, progress=7))
    dead = fakes.worker("trainer/1", WorkerState.DEAD, attempt=5)
    view = fakes.view(*abc(b=fakes.node("b", dead, slots=SLOTS)), seating=seats, wanted=WANTED)
    assert isinstance(seat(view, progress=7)[0], SeatExhausted)
    decision, _ = seat(view, progress=8)
    assert isinstance(decision, ChangeSeats)
    assert decision.seats[-1] == order("trainer/1", "b", 6, failures=1, progress=8)


def test_nothing_is_seated_after_the_end() -> None:
    view = fakes.view(*abc(), wanted=WANTED, outcome=JobOutcome(ok=True, message="done"))
    assert isinstance(seat(view)[0], Keep)


def test_assigned_seats_of_a_node() -> None:
    assert [each.seat for each in assigned(SEATED, "a")] == ["rollout/1", "trainer/0"]
