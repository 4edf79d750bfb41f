"""A job goes on as long as the nodes that are left have room for its trainers."""

from __future__ import annotations

from holdfast.elastic.decisions.remaining import hopeless

LOST = {"n1": "exit status 1", "n2": "signal 9"}


def test_enough_room_is_no_reason_to_end() -> None:
    left = {"n0": {"trainer": 2}, "n3": {"rollout": 4}}
    assert hopeless(left, LOST, needed=2) is None
    assert hopeless(left, LOST, needed=0) is None


def test_too_little_room_names_the_numbers_and_the_lost_nodes() -> None:
    reason = hopeless({"n0": {"trainer": 1, "rollout": 3}}, LOST, needed=2)
    assert reason is not None
    assert "2 trainers are needed and the nodes that are left have room for 1" in reason
    assert "(lost: n1 (exit status 1), n2 (signal 9))" in reason


def test_no_node_is_the_end_whatever_is_needed() -> None:
    reason = hopeless({}, LOST, needed=0)
    assert reason is not None
    assert reason.startswith("every node is lost: n1 (exit status 1), n2 (signal 9)")
