"""Faults around a sidecar stay local: ranks, rebuilds, logs, stores."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from doubles.blocks import write_block
from sidecar_group import (
    DEADLINE_S,
    SidecarGroup,
    inventories,
    sidecar_group,
    wait_until,
    write_step,
)

from holdfast.ckpt.checkpoints import commit
from holdfast.ckpt.errors import CkptError, CorruptError, GivenUpError
from holdfast.ckpt.memory.records import BlockSource
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.reading import decoding

SIZES = (1000, 2000, 3000)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c", threads=True) as group:
        yield group


# -- a step that one rank gives up ---------------------------------------------------------------


def give_up(group: SidecarGroup, *, node: str, rank: int, step: int) -> None:
    client = group.clients[node]
    grant = client.acquire(generation=1, step=step, rank=rank, size_bytes=5000, timeout_s=5)
    client.abandon(grant.slot_id)


def test_a_slot_is_not_taken_from_a_rank_that_still_writes_a_given_up_step(
    three: SidecarGroup,
) -> None:
    world = three.adopt(rank_nodes=("a", "a", "b"), keep=1)
    client = three.clients["a"]
    write_block(client, world, step=1, rank=0, nbytes=1000)
    writing = client.acquire(generation=1, step=1, rank=1, size_bytes=5000, timeout_s=5)
    give_up(three, node="b", rank=2, step=1)
    wait_until(lambda: client.status()["snapshots"] == [], "node a has heard that step 1 is over")
    paths = {
        client.acquire(generation=1, step=step, rank=0, size_bytes=5000, timeout_s=5).path
        for step in (2, 3)
    }
    assert writing.path not in paths


def test_who_comes_late_to_a_given_up_step_is_told_so(three: SidecarGroup) -> None:
    world = three.adopt(rank_nodes=("a", "b"), keep=1)
    give_up(three, node="b", rank=1, step=1)
    client = three.clients["a"]
    wait_until(
        lambda: three.sidecars["a"].core.book.is_gone((1, 1)), "node a has heard of the giving up"
    )
    with pytest.raises(GivenUpError, match="step 1"):
        write_block(client, world, step=1, rank=0, nbytes=1000)


# -- rebuilding ----------------------------------------------------------------------------------


def poison_parity(group: SidecarGroup, *, step: int) -> None:
    """Make parity rows wrong and their checksums right, as if encoded from damaged bytes."""
    for sidecar in group.sidecars.values():
        for row in sidecar.parities.sealed((1, step)):
            assert row.entry is not None and row.buffer is not None
            row.buffer[0] ^= 1
            row.entry = msgspec.structs.replace(row.entry, crc32c=crc32c(row.buffer))


def test_a_block_that_cannot_be_rebuilt_right_is_not_promised_again(three: SidecarGroup) -> None:
    world = three.adopt()
    for step in (1, 2):
        write_step(three, world, step)
    poison_parity(three, step=2)
    three.kill("b", wipe=True)
    point = restore_points(inventories(three))[0][0]
    assert point.step == 2
    client = three.clients[point.sources[1].node]
    with pytest.raises(CorruptError):
        client.open_block(point.world, 2, point.sources[1])
    points, reason = restore_points(inventories(three))
    assert [each.step for each in points] == [1]
    assert "step 2" in reason


def test_a_rebuild_that_fails_unexpectedly_answers_and_can_be_tried_again(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = three.adopt()
    write_step(three, world, 1)
    three.kill("b", wipe=True)
    client = three.clients["a"]
    source = BlockSource(rank=1, node="a", rebuilt=True)

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("mmap closed")

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "BlockCheck", fail)
        started = time.monotonic()
        with pytest.raises(CkptError, match="mmap closed"):
            client.open_block(world, 1, source)
        assert time.monotonic() - started < 10
    assert client.open_block(world, 1, source).payload_bytes == 30_000


def test_a_store_that_hangs_does_not_keep_blocks_from_being_rebuilt(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, entered = threading.Event(), threading.Semaphore(0)

    def hang(*_: Any, **__: Any) -> None:
        entered.release()
        hung.wait(DEADLINE_S)
        raise OSError("unmounted")

    monkeypatch.setattr(commit, "write_pack", hang)
    world = three.adopt(rank_nodes=("a", "a", "b"))
    root = str(three.directory / "checkpoints")
    for rank, node in enumerate(world.rank_nodes):
        target = CheckpointTarget(root=root) if node == "a" else None
        write_block(
            three.clients[node],
            world,
            step=1,
            rank=rank,
            nbytes=SIZES[rank],
            persist=target,
        )
    three.await_protected(world, 1)
    assert entered.acquire(timeout=DEADLINE_S) and entered.acquire(timeout=DEADLINE_S)
    three.kill("b", wipe=True)
    opened = threading.Event()

    def open_it() -> None:
        three.clients["a"].open_block(world, 1, BlockSource(rank=2, node="a", rebuilt=True))
        opened.set()

    threading.Thread(target=open_it, daemon=True).start()
    try:
        assert opened.wait(5)
    finally:
        hung.set()


# -- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_tried_again_is_not_refused_for_its_first_failure(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = three.adopt(rank_nodes=("a", "b"))
    blocked = three.directory / "a-file"
    blocked.write_text("in the way")
    for rank, node in enumerate(world.rank_nodes):
        client = three.clients[node]
        write_block(
            client,
            world,
            step=3,
            rank=rank,
            nbytes=1000,
            persist=CheckpointTarget(root=str(blocked)),
        )
    for client in three.clients.values():
        with pytest.raises(CkptError, match="checkpoint of step 3"):
            client.durable_step(at_least=3, timeout_s=DEADLINE_S)
    point = restore_points(inventories(three))[0][0]
    world = three.adopt(rank_nodes=("a", "b"), generation=2, restore=point)
    write = commit.write_pack

    def slowly(*arguments: Any, **options: Any) -> commit.WriterReceipt:
        time.sleep(0.5)
        return write(*arguments, **options)

    monkeypatch.setattr(commit, "write_pack", slowly)
    root = str(three.directory / "checkpoints")
    for rank, node in enumerate(world.rank_nodes):
        write_block(
            three.clients[node],
            world,
            step=3,
            rank=rank,
            nbytes=1000,
            persist=CheckpointTarget(root=root),
        )
    assert three.clients["a"].durable_step(at_least=3, timeout_s=DEADLINE_S) == 3


# -- slots made ahead ----------------------------------------------------------------------------


def test_the_next_slot_of_a_rank_is_made_ahead_and_no_more_than_it_needs(
    three: SidecarGroup,
) -> None:
    world = three.adopt(rank_nodes=("a",), keep=2)
    client, arena = three.clients["a"], three.sidecars["a"].core.arena.directory
    for step in range(1, 6):
        write_step(three, world, step, sizes=(1000,))
        ahead = min(step + 1, world.keep + 1)
        wait_until(lambda: len(list(arena.glob("*.slot"))) == ahead, "a slot is made ahead")  # noqa: B023
        assert client.status()["slots"]["empty"] == 1


def test_no_slots_are_made_ahead_where_memory_is_scarce(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shutil.disk_usage("/")
    free = itertools.chain([1 << 20], itertools.repeat(100_000))  # enough, then for one slot only
    monkeypatch.setattr(shutil, "disk_usage", lambda _: found._replace(free=next(free)))
    world = three.adopt(rank_nodes=("a",), keep=2)
    write_step(three, world, 1, sizes=(1000,))
    time.sleep(0.1)
    assert len(three.sidecars["a"].core.slots.all()) == 1
