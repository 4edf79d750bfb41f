"""The next attempt after a failed restore point follows from the faults alone."""

from __future__ import annotations

import random

import pytest

from holdfast.ckpt.memory.records import BlockSource, RestorePoint, SidecarPeer, SnapshotWorld
from holdfast.ckpt.recovery.fallback import (
    MAX_ATTEMPTS,
    WHOLE_POINT,
    Course,
    ReadFault,
    ReadFaultKind,
    first_course,
    next_course,
)

NODES = ("a", "b", "c")


def point(
    step: int, *rebuilt: int, parity: int = 1, generation: int = 1, nodes: str = "ab"
) -> RestorePoint:
    world = SnapshotWorld(
        run="r",
        generation=generation,
        peers=tuple(SidecarPeer(node=node, address=f"tcp://{node}") for node in NODES),
        rank_nodes=tuple(nodes),
        parity=parity,
        keep=2,
    )
    sources = tuple(
        BlockSource(rank=rank, node=node, rebuilt=rank in rebuilt)
        for rank, node in enumerate(nodes)
    )
    return RestorePoint(world=world, step=step, sources=sources)


def course(*points: RestorePoint) -> Course:
    return first_course(points[0], points[1:], nodes=NODES)


def fault(rank: int, node: str, kind: ReadFaultKind = ReadFaultKind.DAMAGED) -> ReadFault:
    return ReadFault(rank=rank, node=node, kind=kind, reason=f"rank {rank} on {node} is {kind}")


def sources(now: Course) -> list[tuple[int, str, bool]]:
    assert now.point is not None
    return [(source.rank, source.node, source.rebuilt) for source in now.point.sources]


@pytest.mark.parametrize("kind", [ReadFaultKind.DAMAGED, ReadFaultKind.MISSING])
def test_a_bad_block_is_rebuilt_where_it_was_held(kind: ReadFaultKind) -> None:
    after = next_course(course(point(5), point(4)), [fault(1, "b", kind)])
    assert after.point and after.point.step == 5
    assert sources(after) == [(0, "a", False), (1, "b", True)]
    assert after.why == "rank 1 rebuilt on b"
    assert [older.step for older in after.older] == [4]
    assert after.reasons == (f"step 5 of generation 1: rank 1 on b is {kind}",)


def test_what_a_lost_node_held_is_rebuilt_elsewhere_in_this_and_in_older_steps() -> None:
    now = course(point(5), point(4))
    now = next_course(now, [fault(1, "b", ReadFaultKind.UNREACHABLE)])
    assert sources(now) == [(0, "a", False), (1, "c", True)]
    now = next_course(now, [fault(1, "c")])
    assert now.point and now.point.step == 4
    assert sources(now) == [(0, "a", False), (1, "c", True)], "b is gone for step 4 as well"
    assert now.why.startswith("the block of rank 1 cannot be rebuilt either; step 4")


def test_a_rebuilding_node_that_is_lost_is_replaced() -> None:
    now = course(point(5, 1, nodes="ac"))
    now = next_course(now, [fault(1, "c", ReadFaultKind.UNREACHABLE)])
    assert now.point and now.point.step == 5
    assert sources(now) == [(0, "a", False), (1, "b", True)]


def test_without_parity_the_next_older_step_is_taken() -> None:
    now = next_course(course(point(5, parity=0), point(3, parity=0)), [fault(0, "a")])
    assert now.point == point(3, parity=0)
    assert "no parity guards the block of rank 0" in now.why


def test_a_point_that_does_not_hold_together_is_not_tried_again() -> None:
    now = next_course(course(point(5), point(4)), [fault(WHOLE_POINT, "")])
    assert now.point and now.point.step == 4


def test_nothing_is_left_when_all_points_have_failed() -> None:
    now = course(point(5), point(4))
    for step in (5, 5, 4, 4):
        assert now.point and now.point.step == step
        now = next_course(now, [fault(0, "a")])
    assert now.point is None
    assert now.why.endswith("no other step is in memory")
    assert len(now.reasons) == 4
    with pytest.raises(ValueError, match="no attempt"):
        next_course(now, [fault(0, "a")])


def test_the_attempts_are_bounded() -> None:
    now = course(*(point(step) for step in range(50, 0, -1)))
    attempts = 1
    while (now := next_course(now, [fault(0, "a")])).point is not None:
        attempts += 1
    assert attempts == MAX_ATTEMPTS
    assert now.why == f"{MAX_ATTEMPTS} attempts to restore from memory failed"


def test_all_ranks_decide_the_same_whatever_order_they_heard_it_in() -> None:
    faults = [
        fault(0, "a"),
        fault(1, "b", ReadFaultKind.UNREACHABLE),
        fault(1, "b", ReadFaultKind.MISSING),
        fault(0, "a"),
    ]
    decided = set()
    for seed in range(20):
        shuffled = list(faults)
        random.Random(seed).shuffle(shuffled)
        decided.add(next_course(course(point(5), point(4)), shuffled))
    assert len(decided) == 1
    (now,) = decided
    assert sources(now) == [(0, "a", True), (1, "c", True)]
