"""Ranks agree on a restore point inside one generation, through real sidecars."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from restoring_ranks import (
    RANK_NODES,
    Ranks,
    build,
    damage,
    restore,
    save,
    steps_held,
    value,
    without_memory,
)
from sidecar_group import SidecarGroup

from holdfast import ckpt
from holdfast.ckpt.errors import FencedError
from holdfast.ckpt.memory.records import BlockSource, RestorePoint
from holdfast.elastic.errors import GenerationOverError, JobFailedError, StateLostError

pytestmark = pytest.mark.usefixtures("opened_ahead")


def test_an_intact_point_is_restored_from_where_it_lies(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    results, states = restore(group, ranks, *points)
    assert [value(state) for state in states] == [2, 2]
    assert [each.tier for each in results] == ["peer", "peer"], "each holds a part for both"
    for each in results:
        assert each.bytes == sum(part["bytes"] for part in each.tiers.values())
        assert set(each.tiers) == {"arena", "peer"}
    assert ranks.events == []


def test_a_damaged_block_is_rebuilt_and_the_same_step_restored(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    damage(group, points[0], rank=1)
    results, states = restore(group, ranks, *points)
    assert [value(state) for state in states] == [2, 2]
    assert {each.tier for each in results} == {"parity"}
    assert all(each.how.startswith("rank 1 rebuilt on b: ") for each in results)
    (event,) = ranks.events
    assert (event.step, event.next_step) == (2, 2)
    assert "of rank 1 fails its checksum" in event.reason
    assert group.clients["b"].status()["counters"]["distrusted"] >= 1
    assert steps_held(group) == {1, 2}


def test_more_damage_than_parity_covers_goes_back_to_the_older_step(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    for rank in range(len(RANK_NODES)):
        damage(group, points[0], rank=rank)
    results, states = restore(group, ranks, *points)
    assert [value(state) for state in states] == [1, 1]
    assert {each.step for each in results} == {1}
    assert [event.next_step for event in ranks.events] == [2, 1]
    assert "step 1 of generation 1 is the next older one" in results[0].how
    assert steps_held(group) == {1}, "the step that was given up is not offered again"


def test_a_holder_that_is_gone_is_replaced_by_parity(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    gone = RestorePoint(
        world=points[0].world,
        step=2,
        sources=(points[0].sources[0], BlockSource(rank=1, node="x")),
    )
    results, states = restore(group, ranks, gone, points[1])
    assert [value(state) for state in states] == [2, 2]
    assert "no address of node x" in ranks.events[0].reason
    assert "b" in results[0].how or "c" in results[0].how


def test_where_memory_has_nothing_good_the_checkpoint_is_loaded(
    group: SidecarGroup, tmp_path: Path
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    for point in points:
        for rank in range(len(RANK_NODES)):
            damage(group, point, rank=rank)
    results, states = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [value(state) for state in states] == [7, 7]
    assert {(each.tier, each.step) for each in results} == {("checkpoint", 7)}
    assert "no other step is in memory" in results[0].how
    assert steps_held(group) == set()


def test_a_half_restored_state_is_never_trained_on(group: SidecarGroup, tmp_path: Path) -> None:
    ranks = Ranks()
    points = without_memory(group, ranks)
    results, _ = restore(group, ranks, *points)
    assert [type(each) for each in results] == [StateLostError, StateLostError]
    assert "there is no checkpoint; training starts anew" in str(results[0])
    assert "step 2 of generation 1" in str(results[0])
    assert "step 1 of generation 1" in str(results[0])


def test_damaged_memory_and_damaged_checkpoints_are_both_named(
    group: SidecarGroup, tmp_path: Path
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    root = tmp_path / "saved"
    ckpt.save(root, build(7), step=7)
    for pack in root.rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
    for point in points:
        for rank in range(len(RANK_NODES)):
            damage(group, point, rank=rank)
    results, _ = restore(group, ranks, *points, root=root)
    assert [type(each) for each in results] == [JobFailedError, JobFailedError]
    assert "step 2 of generation 1" in str(results[0])
    assert "no checkpoint can be read in full" in str(results[0])


def test_a_fence_ends_the_attempts_at_once(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    damage(group, points[0], rank=0)
    ranks.fenced = True
    results, _ = restore(group, ranks, *points)
    assert [type(each) for each in results] == [GenerationOverError, GenerationOverError]


def test_what_is_damaged_while_the_state_is_built_is_found(group: SidecarGroup) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    ranks.meanwhile = lambda: damage(group, points[0], rank=1)
    results, states = restore(group, ranks, *points)
    assert [value(state) for state in states] == [2, 2]
    assert {each.tier for each in results} == {"parity"}


def test_a_slot_that_is_used_again_while_the_state_is_built_is_not_taken_for_what_it_was(
    group: SidecarGroup,
) -> None:
    ranks = Ranks()
    points = save(group, ranks)

    def drop_the_step() -> None:
        for client in group.clients.values():
            client.roll_back(2, restore=points[1])

    ranks.meanwhile = drop_the_step
    results, states = restore(group, ranks, *points)
    assert [value(state) for state in states] == [1, 1]
    assert {each.step for each in results} == {1}


def test_who_waits_for_a_slot_is_refused_when_its_generation_is_fenced(
    group: SidecarGroup,
) -> None:
    world = group.adopt(rank_nodes=RANK_NODES)
    client = group.clients["a"]

    def acquire(step: int) -> Any:
        return client.acquire(
            generation=world.generation, step=step, rank=0, size_bytes=1000, timeout_s=30
        )

    for step in range(1, world.keep + 3):
        acquire(step)
    caught: list[Exception] = []

    def wait() -> None:
        try:
            acquire(99)
        except Exception as error:  # noqa: BLE001 - told to the test
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    client.fence(world.generation)
    waiting.join(5)
    assert [type(error) for error in caught] == [FencedError]
    with pytest.raises(FencedError, match="take part in the next one"):
        acquire(100)
    group.adopt(rank_nodes=RANK_NODES, generation=2)
    assert client.acquire(generation=2, step=1, rank=0, size_bytes=1000, timeout_s=5).path
