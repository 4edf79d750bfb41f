"""The coordinator's roll over a run's view: who lives is the coordinator's, times the events'."""

from __future__ import annotations

import msgspec
from large_run import BEGIN_S, training

from holdfast.elastic.events import Detected, Event
from holdfast.tools.live.fold import Fold
from holdfast.tools.live.members.overlay import overlay
from holdfast.tools.live.members.roll import Roll
from holdfast.tools.live.telling import partly
from holdfast.tools.live.view import NodeState, NodeView, RecoveryView, RunView, SeatView
from holdfast.tools.show.node_status import NodeStatus


def node(number: int, state: NodeState = "training", *, rank: int | None = 0) -> NodeView:
    seat = SeatView(
        seat=f"trainer/{number}", role="trainer", pid=7, attempt=2, alive=True, rank=rank
    )
    return NodeView(node=f"node{number}", state=state, why=f"why {state}", seats=(seat,))


def plan(number: int) -> RecoveryView:
    return RecoveryView(
        generation=number, cause="loss", at_s=5.0, proposed_s=5.0, ranks=2, reason="the plan"
    )


def roll(*nodes: NodeView, generation: int = 1, state: str = "training") -> Roll:
    return Roll(
        run="r",
        state=state,  # type: ignore[arg-type]
        generation=generation,
        world=len(nodes),
        wanted={"trainer": 4},
        nodes=nodes,
        plans=(plan(generation),),
        members=frozenset(each.node for each in nodes),
    )


def shown(held: Roll, *events: Event, steps: int = 20, nodes: int = 2) -> RunView:
    fold = Fold()
    fold.apply([*training(nodes, steps=steps), *events] if steps else events)
    now_s = fold.last_s or BEGIN_S
    return overlay(fold.view(now_s=now_s), held, heard=fold.heard(), since_s=BEGIN_S)


def states(view: RunView) -> dict[str, str]:
    return {each.node: each.state for each in view.nodes}


def test_without_events_the_coordinator_tells_all_that_is_known() -> None:
    fold = Fold()
    status = {"generation": 4, "committed": 33, "protected": 32, "persisted": [30]}
    answers = {"node0": NodeStatus(node="node0", sidecar=0, status=status)}
    empty = fold.view(now_s=BEGIN_S, statuses=answers)
    view = overlay(empty, roll(node(0), node(1), generation=4), heard=(), since_s=BEGIN_S)
    assert (view.source, view.state, view.run, view.generation) == (
        "coordinator",
        "training",
        "r",
        4,
    )
    assert (view.step, view.protection.step, view.protection.at_risk_steps) == (33, 32, 1)
    assert view.checkpoints.durable_step == 30
    assert states(view) == {"node0": "training", "node1": "training"}
    assert view.recoveries[0].reason == "the plan"
    assert "need events" in partly(view)


def test_nodes_without_events_come_from_the_coordinator() -> None:
    view = shown(roll(node(0), node(1), node(2), node(3, "spare", rank=None)))
    assert states(view)["node3"] == "spare"
    assert view.unheard == ("node2", "node3")
    assert not view.timed
    assert partly(view).startswith("No events of node2, node3 are read")


def test_with_all_events_the_view_stays_as_it_was() -> None:
    fold = Fold()
    fold.apply(training(2, steps=20))
    plain = fold.view(now_s=fold.last_s)
    view = overlay(plain, roll(node(0), node(1)), heard=fold.heard(), since_s=BEGIN_S)
    assert view == msgspec.structs.replace(plain, source="both")
    assert partly(view) == ""


def test_a_lease_decides_whether_a_node_lives() -> None:
    lost = Detected(what="node_lost", victim="node1", node="node0", source="agent")
    lost = msgspec.structs.replace(lost, time_s=BEGIN_S + 500)
    assert states(shown(roll(node(0), node(1)), lost))["node1"] == "training"
    view = shown(roll(node(0), node(1, "lost", rank=None)))
    assert states(view)["node1"] == "lost"
    assert [seat.alive for seat in view.nodes[1].seats] == [False]


def test_a_node_that_waits_is_held_off_where_the_coordinator_says_so() -> None:
    view = shown(roll(node(0), node(1, "held off", rank=None), generation=2))
    assert states(view)["node1"] == "held off"


def test_a_plan_that_no_event_told_is_added_with_its_ranks() -> None:
    view = shown(roll(node(0, rank=1), node(1, rank=0), generation=2))
    assert (view.generation, [each.generation for each in view.recoveries]) == (2, [2, 1])
    first = view.nodes[0].seats[0]
    assert (first.rank, first.step) == (1, 20), "the rank of the plan, the step of the events"


def test_the_outcome_at_the_coordinator_ends_the_view() -> None:
    held = msgspec.structs.replace(roll(node(0), state="failed"), message="it broke")
    view = shown(held)
    assert (view.state, view.message, view.ended_s is not None) == ("failed", "it broke", True)
