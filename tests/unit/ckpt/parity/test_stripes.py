"""Restore points: which snapshots survive which losses, and the reasons for the others."""

from __future__ import annotations

from doubles.blocks import make_world

from holdfast.ckpt.memory.records import BlockEntry, Inventory, ParityEntry, SnapshotWorld
from holdfast.ckpt.parity.stripes import Geometry, restore_points

NODES = {name: f"tcp://{name}" for name in ("a", "b", "c")}
WORLD = make_world(NODES, parity=1)


def entry(rank: int, step: int = 1, generation: int = 1, crc: int = 0) -> BlockEntry:
    return BlockEntry(
        generation=generation,
        step=step,
        rank=rank,
        payload_bytes=1000 + rank,
        index_bytes=100,
        index_crc32c=crc,
    )


def inventory(
    node: str, *steps: int, world: SnapshotWorld = WORLD, parity: bool = True
) -> Inventory:
    """Return the inventory of ``node`` after ``steps`` that every rank sealed."""
    sealed = tuple(
        entry(rank, step, world.generation)
        for step in steps
        for rank in range(len(world.rank_nodes))
    )
    parities = []
    for step in steps:
        geometry = Geometry(world, {e.rank: e for e in sealed if e.step == step})
        for stripe, row in geometry.rows_of(node):
            parities.append(
                ParityEntry(
                    generation=world.generation,
                    step=step,
                    stripe=stripe,
                    row=row,
                    nbytes=geometry.row_bytes(stripe),
                    crc32c=0,
                )
            )
    return Inventory(
        node=node,
        worlds=(world,),
        blocks=tuple(e for e in sealed if world.rank_nodes[e.rank] == node),
        parities=tuple(parities) if parity else (),
        sealed=sealed,
    )


def test_with_everybody_there_each_block_comes_from_its_own_node() -> None:
    points, reason = restore_points([inventory(node, 1, 2) for node in NODES])
    assert [point.step for point in points] == [2, 1]
    assert [(s.rank, s.node, s.rebuilt) for s in points[0].sources] == [
        (0, "a", False),
        (1, "b", False),
        (2, "c", False),
    ]
    assert reason == "step 2 of generation 1: every rank's block is in memory"


def test_a_lost_node_is_rebuilt_from_parity() -> None:
    points, reason = restore_points([inventory("a", 2), inventory("c", 2)])
    assert [(s.rank, s.rebuilt) for s in points[0].sources] == [(0, False), (1, True), (2, False)]
    assert points[0].sources[1].node in ("a", "c")
    assert "rank 1 on" in reason


def test_more_lost_nodes_than_parity_are_refused_with_the_stripe() -> None:
    points, reason = restore_points([inventory("a", 2)])
    assert points == []
    assert "the block of rank 1 (node b) is gone" in reason
    assert "has 1 of the 2 fragments it needs: those of nodes b, c are missing" in reason


def test_a_step_whose_parity_was_not_finished_falls_back_to_the_one_before() -> None:
    half = Inventory(
        node="c",
        worlds=(WORLD,),
        blocks=tuple(entry(2, step) for step in (1, 2)),
        parities=tuple(p for p in inventory("c", 1, 2).parities if p.step == 1),
        sealed=inventory("c", 1, 2).sealed,
    )
    points, reason = restore_points([inventory("a", 1, 2), half])
    assert [point.step for point in points] == [1]
    assert reason.startswith("step 2 of generation 1 cannot be restored: the block of rank 1")


def test_a_rank_that_never_sealed_is_named() -> None:
    partial = Inventory(
        node="a", worlds=(WORLD,), blocks=(entry(0),), parities=(), sealed=(entry(0),)
    )
    points, reason = restore_points([partial])
    assert points == []
    assert "ranks [1, 2] had not sealed it" in reason


def test_two_different_blocks_of_one_rank_are_trusted_by_nobody() -> None:
    other = Inventory(node="b", worlds=(WORLD,), blocks=(entry(0, crc=7),), parities=(), sealed=())
    points, reason = restore_points([inventory("a", 1), other])
    assert points == []
    assert "was sealed twice" in reason


def test_a_newer_generation_goes_before_a_later_step_of_an_older_one() -> None:
    newer = make_world(NODES, parity=1, generation=2)
    stale = [inventory(node, 9) for node in NODES]
    fresh = [inventory(node, 5, world=newer) for node in NODES]
    points, _ = restore_points(stale + fresh)
    assert [(p.world.generation, p.step) for p in points] == [(2, 5), (1, 9)]


def test_rebuilding_is_shared_out() -> None:
    nodes = {name: f"tcp://{name}" for name in "abcd"}
    world = make_world(nodes, rank_nodes=("a", "a", "b", "c"), parity=1)
    points, _ = restore_points([inventory(node, 1, world=world) for node in "bcd"])
    rebuilding = [s.node for s in points[0].sources if s.rebuilt]
    assert len(rebuilding) == len(set(rebuilding)) == 2


def test_groups_stand_alone_in_what_they_survive() -> None:
    nodes = {name: f"tcp://{name}" for name in "abcdef"}
    groups = (("a", "c", "e"), ("b", "d", "f"))
    world = make_world(nodes, parity=1, groups=groups)
    points, reason = restore_points([inventory(node, 1, world=world) for node in "cdef"])
    assert [s.rank for s in points[0].sources if s.rebuilt] == [0, 1]
    points, reason = restore_points([inventory(node, 1, world=world) for node in "bdef"])
    assert points == []
    assert "the block of rank 0 (node a) is gone and stripe" in reason
    assert "those of nodes a, c are missing" in reason


def test_copies_survive_the_loss_of_distant_nodes() -> None:
    nodes = {name: f"tcp://{name}" for name in "abcd"}
    world = make_world(nodes, parity=1, columns=1)
    points, _ = restore_points([inventory(node, 1, world=world) for node in "bd"])
    assert [(s.rank, s.rebuilt) for s in points[0].sources if s.rebuilt] == [(0, True), (2, True)]
    points, reason = restore_points([inventory(node, 1, world=world) for node in "cd"])
    assert points == []
    assert "has 0 of the 1 fragments it needs: those of nodes a, b are missing" in reason


def test_nothing_in_memory_is_said_plainly() -> None:
    empty = Inventory(node="a", worlds=(), blocks=(), parities=(), sealed=())
    assert restore_points([empty]) == ([], "no snapshot in the memory of nodes ['a']")
