"""A joiner predicts the rank that the plan will give it while the others still train."""

from __future__ import annotations

import msgspec
import pytest
from doubles import fakes

from holdfast.elastic.membership.records import (
    GenerationRecord,
    JobSpec,
    NodeRecord,
    Roster,
    WorkerState,
)
from holdfast.elastic.planning.foresight import foresee, knows, others_train
from holdfast.elastic.planning.plan import plan

NUMBER = 5


def trainer_of(seat: int, state: WorkerState, *, after: int = 0) -> NodeRecord:
    worker = fakes.worker(f"trainer/{seat}", state, ready_after=after)
    return fakes.node(f"n{seat}", worker, slots={"trainer": 1})


def training(members: int, *, joiner: int) -> tuple[list[NodeRecord], GenerationRecord]:
    """Return the nodes of a generation and, last, one whose worker is starting."""
    seats = [seat for seat in range(members + 1) if seat != joiner]
    nodes = [trainer_of(seat, WorkerState.ACTIVE) for seat in seats]
    ranks = [(node.node, node.workers[0]) for node in nodes]
    record = fakes.generation(NUMBER, nodes, ranks=ranks)
    return [*nodes, trainer_of(joiner, WorkerState.STARTING)], record


def parked(node: NodeRecord, record: GenerationRecord) -> NodeRecord:
    """Return a node's record once it has fenced the generation."""
    worker = node.workers[0]
    after = NUMBER if worker.state is WorkerState.ACTIVE else 0
    ready = msgspec.structs.replace(worker, state=WorkerState.READY, ready_after=after)
    known = node.node in record.nodes
    inventory = fakes.inventory(node.node, record.snapshots, 17) if known else None
    return msgspec.structs.replace(node, workers=(ready,), fenced=NUMBER, inventory=inventory)


@pytest.mark.parametrize("members", [1, 2, 3, 4, 7])
def test_the_rank_is_the_one_that_the_plan_gives(members: int) -> None:
    for joiner in range(members + 1):
        nodes, record = training(members, joiner=joiner)
        me = nodes[-1].workers[0].incarnation
        found = foresee(
            Roster(nodes=tuple(nodes), generation=record),
            incarnation=me,
            spec=JobSpec(),
            point=fakes.held(record.snapshots, 17),
            sizes={rank: 1000 + rank for rank in range(members)},
        )
        assert found is not None
        after = fakes.view(
            *(parked(node, record) for node in nodes),
            generation=record,
            wanted={"trainer": members + 1},
        )
        planned, _ = plan(after)
        ranks = {member.incarnation: member.rank for member in planned.members}
        assert found[1] == ranks[me]
        assert (found[0].mesh, found[0].number) == (planned.mesh, planned.number)


def test_a_roster_from_before_a_worker_began_does_not_know_it() -> None:
    nodes, record = training(2, joiner=2)
    me = nodes[-1].workers[0].incarnation
    assert knows(Roster(nodes=tuple(nodes), generation=record), incarnation=me)
    assert not knows(Roster(nodes=tuple(nodes[:-1]), generation=record), incarnation=me)


def test_a_spare_is_prepared_for_the_last_rank() -> None:
    nodes, record = training(2, joiner=2)
    found = foresee(
        Roster(nodes=tuple(nodes), generation=record),
        incarnation=nodes[-1].workers[0].incarnation,
        spec=JobSpec(dp=2),
        point=fakes.held(record.snapshots, 17),
        sizes={0: 1000, 1: 1001},
    )
    assert found is not None
    assert (found[0].mesh.ranks, found[1]) == (2, 1)


def test_a_worker_that_is_not_in_the_roster_foresees_nothing() -> None:
    nodes, record = training(2, joiner=2)
    roster = Roster(nodes=tuple(nodes[:-1]), generation=record)
    point = fakes.held(record.snapshots, 17)
    assert foresee(roster, incarnation="x", spec=JobSpec(), point=point, sizes={}) is None


def test_others_train_while_all_members_work_and_nobody_has_fenced() -> None:
    nodes, record = training(2, joiner=2)
    assert others_train(Roster(nodes=tuple(nodes), generation=record))
    assert not others_train(Roster(nodes=tuple(nodes)))
    assert not others_train(Roster(nodes=tuple(nodes[1:]), generation=record)), "a node is gone"
    fenced = msgspec.structs.replace(nodes[0], fenced=NUMBER)
    assert not others_train(Roster(nodes=(fenced, *nodes[1:]), generation=record))
    left = parked(nodes[0], record)
    left = msgspec.structs.replace(left, fenced=0)
    assert not others_train(Roster(nodes=(left, *nodes[1:]), generation=record))
