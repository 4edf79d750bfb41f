"""The decisions about the nodes of a job on Ray."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.adapters.ray.slots import (
    FAREWELL_S,
    MOST_FAILURES,
    SETTLE_S,
    STEADY_S,
    AskForNode,
    BeginOnNode,
    EndJob,
    LeaveNode,
    NodeEnd,
    SlotAction,
    SlotEnded,
    SlotLost,
    SlotPhase,
    SlotPlaced,
    SlotTable,
)

WAIT_S = 600.0


def table(least: int = 2, most: int = 3) -> SlotTable:
    made = SlotTable(least=least, most=most, wait_s=WAIT_S)
    assert made.begin(0.0) == [AskForNode(slot=number) for number in range(most)]
    return made


def running(least: int = 2, most: int = 3) -> SlotTable:
    made = table(least, most)
    for number in range(most):
        placed = SlotPlaced(slot=number, node=f"n{number}")
        assert made.after(placed, 1.0) == [BeginOnNode(slot=number)]
    assert made.tick(1.0) == []
    return made


def ended(slot: int, status: int, *, left: bool = False, message: str = "why") -> SlotEnded:
    end = NodeEnd(slot=slot, node="", address="", status=status, message=message, left=left)
    return SlotEnded(end=end)


def avoiding(slot: int, *nodes: str) -> AskForNode:
    return AskForNode(slot=slot, avoid=frozenset(nodes))


def test_a_job_is_done_when_all_nodes_have_said_so() -> None:
    made = running()
    assert made.after(ended(1, 0), 5.0) == []
    assert made.after(ended(0, 0), 5.1) == []
    assert made.after(ended(2, 0), 5.2) == [EndJob(ok=True, message="")]


def test_a_node_that_says_nothing_does_not_hold_up_a_job_that_is_done() -> None:
    made = running()
    made.after(ended(1, 0), 5.0)
    assert made.tick(5.0 + FAREWELL_S) == []
    assert made.tick(5.1 + FAREWELL_S) == [EndJob(ok=True, message="")]


def test_after_the_end_nothing_is_asked_for_and_nothing_begins() -> None:
    made = running()
    made.after(ended(1, 0), 5.0)
    assert made.after(SlotLost(slot=0, why="its node died"), 5.1) == []
    assert made.after(SlotPlaced(slot=0, node="n7"), 5.2) == []
    assert made.after(ended(2, 1), 5.3) == [EndJob(ok=True, message="")]


def test_a_lost_node_and_one_that_left_are_replaced_at_once() -> None:
    made = running()
    assert made.after(SlotLost(slot=0, why="its node died"), 5.0) == [avoiding(0, "n1", "n2")]
    assert made.after(ended(2, 1, left=True), 6.0) == [avoiding(2, "n1")]
    assert made.after(SlotPlaced(slot=0, node="n5"), 7.0) == [BeginOnNode(slot=0)]


def test_a_further_slot_gets_no_node_that_is_in_use() -> None:
    made = running()
    made.after(SlotLost(slot=2, why="its node died"), 5.0)
    assert made.after(SlotPlaced(slot=2, node="n0"), 6.0) == [avoiding(2, "n0", "n1")]


def test_a_slot_of_the_base_gets_the_node_of_a_further_slot_after_that_has_left() -> None:
    made = running()
    made.after(SlotLost(slot=0, why="its node died"), 5.0)
    assert made.after(SlotPlaced(slot=0, node="n2"), 6.0) == [LeaveNode(slot=2)]
    assert made.slots[0].phase is SlotPhase.WAITING
    assert made.after(ended(2, 1, left=True), 7.0) == [
        BeginOnNode(slot=0),
        avoiding(2, "n1", "n2"),
    ]


def test_a_job_that_fails_ends_with_the_first_reason() -> None:
    made = running()
    assert made.after(ended(1, 1, message="ValueError in train.py"), 5.0) == []
    assert made.after(ended(0, 1, message="another"), 5.1) == []
    assert made.after(ended(2, 1, message="third"), 5.2) == [
        EndJob(ok=False, message="ValueError in train.py")
    ]


def test_a_node_that_ends_by_itself_is_begun_again_if_the_others_go_on() -> None:
    made = running()
    made.after(ended(1, 1), 5.0)
    assert made.tick(5.0 + SETTLE_S) == []
    assert made.tick(5.1 + SETTLE_S) == [avoiding(1, "n0", "n2")]


def fail_often(made: SlotTable, times: int, *, runs_s: float) -> list[list[SlotAction]]:
    now_s, seen = 10.0, []
    for _ in range(times):
        now_s += runs_s
        made.after(ended(1, 1), now_s)
        now_s += SETTLE_S + 1
        seen.append(made.tick(now_s))
        made.after(SlotPlaced(slot=1, node="n1"), now_s)
    return seen


def test_a_slot_whose_nodes_fail_in_a_row_is_given_up() -> None:
    made = running()
    seen = fail_often(made, MOST_FAILURES, runs_s=1.0)
    assert [len(actions) for actions in seen] == [1] * (MOST_FAILURES - 1) + [0]


def test_a_slot_whose_nodes_ran_for_long_is_not_given_up() -> None:
    seen = fail_often(running(), 3 * MOST_FAILURES, runs_s=STEADY_S + 1)
    assert all(len(actions) == 1 for actions in seen)


def test_a_cluster_without_room_ends_the_job_in_time() -> None:
    made = table()
    made.after(SlotPlaced(slot=0, node="n0"), 1.0)
    assert made.tick(WAIT_S) == []
    (end,) = made.tick(WAIT_S + 0.1)
    assert isinstance(end, EndJob)
    assert not end.ok
    assert "1 of at least 2 nodes within 600 s" in end.message


def test_a_job_that_began_waits_for_any_node_and_not_for_the_least() -> None:
    made = running()
    for slot in (0, 1):
        made.after(SlotLost(slot=slot, why="its node died"), 5.0)
    assert made.tick(5.0 + 2 * WAIT_S) == []
    made.after(SlotLost(slot=2, why="its node died"), 2000.0)
    assert made.tick(2000.0) == []
    assert made.tick(2000.0 + WAIT_S) == []
    (end,) = made.tick(2000.1 + WAIT_S)
    assert isinstance(end, EndJob)
    assert "0 of at least 1 nodes" in end.message


def test_a_process_that_ray_cannot_start_ends_a_job_that_has_not_begun() -> None:
    made = table()
    for _ in range(MOST_FAILURES - 1):
        assert made.after(SlotLost(slot=0, why="no holdfast there"), 1.0) == [AskForNode(slot=0)]
    (end,) = made.after(SlotLost(slot=0, why="no holdfast there"), 1.0)
    assert isinstance(end, EndJob)
    assert not end.ok
    assert "no holdfast there; Holdfast must be installed on all nodes" in end.message


def test_a_process_that_ray_cannot_start_does_not_end_a_job_that_runs() -> None:
    made = running()
    made.after(SlotLost(slot=2, why="its node died"), 2.0)
    for _ in range(MOST_FAILURES - 1):
        assert made.after(SlotLost(slot=2, why="no holdfast there"), 3.0) == [
            avoiding(2, "n0", "n1")
        ]
    assert made.after(SlotLost(slot=2, why="no holdfast there"), 3.0) == []
    assert made.slots[2].phase is SlotPhase.CLOSED


HAPPENINGS = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from(["place", "lose", "leave", "fail"]), st.integers(0, 5)
    ),
    max_size=60,
)


@given(HAPPENINGS)
def test_no_two_parts_ever_run_on_one_node(happenings: list[tuple[int, str, int]]) -> None:
    made = SlotTable(least=2, most=4, wait_s=WAIT_S)
    asked = {action.slot for action in made.begin(0.0) if isinstance(action, AskForNode)}
    active: dict[int, str] = {}
    for now_s, (slot, what, node) in enumerate(happenings):
        if what == "place" and slot in asked:
            asked.discard(slot)
            actions = made.after(SlotPlaced(slot=slot, node=f"n{node}"), float(now_s))
        elif what != "place" and slot in active:
            del active[slot]
            happened = {
                "lose": SlotLost(slot=slot, why="lost"),
                "leave": ended(slot, 1, left=True),
                "fail": ended(slot, 1),
            }[what]
            actions = made.after(happened, float(now_s))
        else:
            continue
        for action in actions:
            if isinstance(action, AskForNode):
                asked.add(action.slot)
            elif isinstance(action, BeginOnNode):
                active[action.slot] = made.slots[action.slot].node
        assert len(set(active.values())) == len(active)


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_whichever_node_is_lost_the_others_are_left_alone(slot: int) -> None:
    made = running()
    (action,) = made.after(SlotLost(slot=slot, why="its node died"), 5.0)
    assert isinstance(action, AskForNode)
    assert action.slot == slot
