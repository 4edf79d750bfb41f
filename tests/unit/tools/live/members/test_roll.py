"""The roll of a job by its coordinator's records: states, ranks, losses, plans."""

from __future__ import annotations

import msgspec
import pytest
from doubles import fakes

from holdfast.elastic.membership.records import (
    GenerationRecord,
    JobOutcome,
    NodeRecord,
    Setback,
    WorkerState,
)
from holdfast.tools.live.members.roll import MOST_PLANS, RollCall


def trainer(
    number: int, state: WorkerState = WorkerState.ACTIVE, *, attempt: int = 1
) -> NodeRecord:
    seat = fakes.worker(f"trainer/{number}", state, attempt=attempt, ending="killed by SIGKILL")
    return fakes.node(f"n{number}", seat)


def generation(number: int, *nodes: NodeRecord) -> GenerationRecord:
    return fakes.generation(number, nodes, ranks=[(each.node, each.workers[0]) for each in nodes])


def states(call: RollCall, *nodes: NodeRecord, of: GenerationRecord | None) -> dict[str, str]:
    roll = call.take(fakes.view(*nodes, generation=of), now_s=1.0)
    return {node.node: node.state for node in roll.nodes}


def test_members_have_their_ranks_and_the_job_trains() -> None:
    nodes = [trainer(0), trainer(1)]
    roll = RollCall().take(fakes.view(*nodes, generation=generation(3, *nodes)), now_s=1.0)
    assert (roll.state, roll.generation, roll.world) == ("training", 3, 2)
    assert [node.seats[0].rank for node in roll.nodes] == [0, 1]
    assert roll.members == {"n0", "n1"}
    (plan,) = roll.plans
    assert (plan.reason, plan.cause, plan.dated) == ("because", "change", False)


def test_before_the_first_generation_it_starts() -> None:
    roll = RollCall().take(fakes.view(trainer(0, WorkerState.STARTING)), now_s=1.0)
    assert (roll.state, roll.nodes[0].state) == ("starting", "restoring")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (WorkerState.READY, "restoring"),
        (WorkerState.DEAD, "restoring"),
        (WorkerState.DONE, "idle"),
        (WorkerState.ACTIVE, "training"),
    ],
)
def test_a_member_is_as_its_worker(state: WorkerState, expected: str) -> None:
    nodes = [trainer(0), trainer(1, state)]
    assert states(RollCall(), *nodes, of=generation(2, *nodes)) == {
        "n0": "training",
        "n1": expected,
    }


def test_a_trainer_without_a_rank_is_a_spare_or_held_off() -> None:
    record = generation(2, trainer(0))
    spare = trainer(1, WorkerState.READY)
    assert states(RollCall(), trainer(0), spare, of=record)["n1"] == "spare"
    often = msgspec.structs.replace(record, setbacks={"n1": Setback(losses=5)})
    roll = RollCall().take(fakes.view(trainer(0), spare, generation=often), now_s=1.0)
    assert (roll.nodes[1].state, roll.nodes[1].losses) == ("held off", 5)
    assert roll.nodes[1].why == "it was lost 5 times, and waits 2 s before it is let in"


def test_a_node_whose_record_goes_is_lost_until_it_is_back() -> None:
    nodes = [trainer(0), trainer(1)]
    call, record = RollCall(), generation(2, *nodes)
    call.take(fakes.view(*nodes, generation=record), now_s=1.0)
    gone = call.take(fakes.view(nodes[0], generation=record), now_s=9.0)
    assert (gone.state, gone.nodes[1].state, gone.nodes[1].since_s) == ("recovering", "lost", 9.0)
    alone = generation(3, nodes[0])
    after = call.take(fakes.view(nodes[0], generation=alone), now_s=10.0)
    assert (after.plans[0].cause, after.plans[0].victims) == ("loss", ("n1",))
    assert (after.plans[0].at_s, after.plans[0].dated, after.plans[0].over) == (10.0, True, True)
    back = call.take(fakes.view(*nodes, generation=alone), now_s=12.0)
    assert (back.nodes[1].state, back.nodes[1].losses) == ("spare", 1)
    joined = call.take(fakes.view(*nodes, generation=generation(4, *nodes)), now_s=13.0)
    assert (joined.plans[0].cause, joined.plans[0].victims) == ("join", ("n1",))


def test_a_node_that_was_lost_before_the_first_look_is_known() -> None:
    record = generation(2, trainer(0), trainer(1))
    roll = RollCall().take(fakes.view(trainer(0), generation=record), now_s=1.0)
    assert (roll.nodes[1].node, roll.nodes[1].state, roll.nodes[1].since_s) == ("n1", "lost", None)


def test_a_node_that_leaves_is_not_lost() -> None:
    nodes = [trainer(0), msgspec.structs.replace(trainer(1), leaving=1)]
    call, record = RollCall(), generation(2, *nodes)
    first = call.take(fakes.view(*nodes, generation=record), now_s=1.0)
    assert "notice" in first.nodes[1].why
    after = call.take(fakes.view(nodes[0], generation=record), now_s=2.0)
    assert (after.nodes[1].state, after.nodes[1].losses) == ("left", 0)


def test_a_worker_that_was_replaced_is_the_cause_of_a_plan() -> None:
    nodes = [trainer(0), trainer(1)]
    call = RollCall()
    call.take(fakes.view(*nodes, generation=generation(2, *nodes)), now_s=1.0)
    again = [nodes[0], trainer(1, attempt=2)]
    roll = call.take(fakes.view(*again, generation=generation(3, *again)), now_s=2.0)
    assert (roll.plans[0].cause, roll.plans[0].victims) == ("loss", ("trainer/1",))


def test_the_outcome_is_told_and_no_node_is_lost_by_it() -> None:
    nodes = [trainer(0), trainer(1)]
    call, record = RollCall(), generation(2, *nodes)
    call.take(fakes.view(*nodes, generation=record), now_s=1.0)
    outcome = JobOutcome(ok=False, message="it broke")
    roll = call.take(fakes.view(nodes[0], generation=record, outcome=outcome), now_s=2.0)
    assert (roll.state, roll.message) == ("failed", "it broke")
    assert [node.state for node in roll.nodes] == ["idle", "idle"]
    assert roll.nodes[1].losses == 0


def test_what_is_remembered_is_bounded() -> None:
    call = RollCall()
    for number in range(1, 3 * MOST_PLANS):
        roll = call.take(fakes.view(trainer(0), generation=generation(number, trainer(0))), now_s=1)
    assert len(roll.plans) == MOST_PLANS
    assert roll.plans[0].generation == 3 * MOST_PLANS - 1
