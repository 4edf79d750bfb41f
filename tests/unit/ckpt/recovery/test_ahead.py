"""Prefetched bytes belong to the step that they claim, or are fetched again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from doubles.blocks import make_world, random_payload, write_payload
from sidecar_group import sidecar_group, wait_until

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.shard_index import Chunk, ChunkRef
from holdfast.ckpt.memory.records import BlockSource, RestorePoint, SnapshotWorld
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.sums import SUM_BYTES
from holdfast.ckpt.recovery.prefetched import Ahead, Range, StepKey, compare, fetch, wanted_of
from holdfast.ckpt.sidecar.parity import differences

WORLD = make_world({"a": "tcp://127.0.0.1:1"}, run="r", rank_nodes=("a",), parity=0)


class Holder:
    """A sidecar that has the blocks of rank 0 by step, and counts the bytes it sends."""

    def __init__(self, blocks: dict[int, bytes]) -> None:
        self.blocks, self.sent = blocks, 0

    def read(
        self, world: SnapshotWorld, step: int, rank: int, ranges: Sequence[Range]
    ) -> list[memoryview]:
        assert rank == 0
        if step not in self.blocks:
            raise NotFoundError(f"step {step} was released")
        self.sent += sum(nbytes for _, nbytes in ranges)
        return [memoryview(self.blocks[step][at : at + nbytes]) for at, nbytes in ranges]

    def follow(self, world: SnapshotWorld, step: int, rank: int) -> None:
        assert rank == 0

    def changed(
        self, world: SnapshotWorld, step: int, rank: int, *, base: StepKey
    ) -> tuple[Range, ...] | None:
        if base[1] not in self.blocks:
            return None
        new, old = self.blocks[step], self.blocks[base[1]]
        return tuple((at, 1) for at in range(len(new)) if new[at : at + 1] != old[at : at + 1])


def point(step: int) -> RestorePoint:
    source = BlockSource(rank=0, node="a")
    return RestorePoint(world=WORLD, step=step, sources=(source,))


def chunk(at: int, data: bytes, *, writer: int = 0) -> ChunkRef:
    box = Box(offset=(0,), shape=(len(data),))
    found = Chunk(box=box, at=at, nbytes=len(data), crc32c=crc32c(data))
    return ChunkRef(writer=writer, fqn="w", dtype="uint8", chunk=found)


def test_only_what_changed_is_fetched_again() -> None:
    holder = Holder({1: b"aaaabbbbcccc", 2: b"aaaabbXbcccc"})
    ahead = Ahead({0: [(0, 4), (4, 4), (8, 4)]})
    assert sum(fetch(ahead, point(1), lambda node: holder)) == 12
    assert sum(fetch(ahead, point(2), lambda node: holder)) == 4
    assert holder.sent == 16
    assert ahead.held_bytes((WORLD.generation, 2)) == ahead.nbytes == 12
    for at in (0, 4, 8):
        ref = chunk(at, holder.blocks[2][at : at + 4])
        taken = ahead.take((WORLD.generation, 2), ref)
        assert taken is not None
        assert bytes(taken) == holder.blocks[2][at : at + 4]


def test_what_cannot_be_compared_any_more_is_fetched_again() -> None:
    holder = Holder({1: b"aaaabbbb"})
    ahead = Ahead({0: [(0, 4), (4, 4)]})
    list(fetch(ahead, point(1), lambda node: holder))
    holder.blocks = {3: b"aaaabbbb"}
    compare(ahead, point(3), point(3).sources[0], holder)
    assert ahead.stale((WORLD.generation, 3), 0) == [(0, 4), (4, 4)]


def test_what_is_of_another_step_is_not_given_out() -> None:
    holder = Holder({1: b"aaaa"})
    ahead = Ahead({0: [(0, 4)]})
    list(fetch(ahead, point(1), lambda node: holder))
    assert ahead.take((WORLD.generation, 2), chunk(0, b"aaaa")) is None
    assert ahead.take((WORLD.generation, 1), chunk(0, b"aaaa")) is not None


def test_what_fails_its_checksum_is_not_given_out() -> None:
    key = (WORLD.generation, 1)
    ahead = Ahead({0: [(0, 4)]})
    ahead.put(key, 0, at=0, data=memoryview(b"aaXa"))
    assert ahead.has(key, chunk(0, b"aaaa"))
    assert ahead.take(key, chunk(0, b"aaaa")) is None


def test_nothing_is_written_once_it_is_frozen() -> None:
    key = (WORLD.generation, 1)
    ahead = Ahead({0: [(0, 4)]})
    ahead.put(key, 0, at=0, data=memoryview(b"aaaa"))
    ahead.freeze()
    ahead.put((WORLD.generation, 2), 0, at=0, data=memoryview(b"bbbb"))
    taken = ahead.take(key, chunk(0, b"aaaa"))
    assert taken is not None
    assert bytes(taken) == b"aaaa"


def test_a_holder_that_released_the_step_ends_the_pass() -> None:
    ahead = Ahead({0: [(0, 4)]})
    with pytest.raises(NotFoundError):
        list(fetch(ahead, point(7), lambda node: Holder({})))
    assert ahead.held_bytes((WORLD.generation, 7)) == 0


def test_only_chunks_of_other_hosts_are_wanted_and_each_once() -> None:
    refs = [chunk(8, b"cc"), chunk(0, b"aa"), chunk(8, b"cc"), chunk(4, b"b", writer=1)]
    assert wanted_of(refs, frozenset({0})) == {0: [(0, 2), (8, 2)]}


def test_a_sidecar_says_which_runs_of_a_block_changed(tmp_path: Path) -> None:
    with sidecar_group(tmp_path, "a", "b", threads=True) as group:
        world = group.adopt(rank_nodes=("a", "b"))
        size = 3 * SUM_BYTES + 1000
        first = bytearray(random_payload(size, seed=(1,)))
        for step, change in ((1, None), (2, SUM_BYTES + 5), (3, None)):
            if change is not None:
                first[change] ^= 1
            write_payload(group.clients["a"], world, step=step, rank=0, payload=bytes(first))
            write_payload(group.clients["b"], world, step=step, rank=1, payload=b"x" * 100)
            group.await_protected(world, step)
        client = group.clients["a"]
        found = client.changed(world, 3, 0, base=(world.generation, 2))
        assert found is not None
        assert all(at >= 3 * SUM_BYTES for at, _ in found), "only the index names another step"
        assert client.changed(world, 3, 0, base=(world.generation, 1)) is None, "it was released"
        with pytest.raises(NotFoundError):
            client.changed(world, 9, 0, base=(world.generation, 3))
        with pytest.raises(NotFoundError):
            client.changed(world, 3, 1, base=(world.generation, 2))


def test_a_sidecar_keeps_the_block_that_was_followed_last(tmp_path: Path) -> None:
    with sidecar_group(tmp_path, "a", threads=True) as group:
        world, client = group.adopt(rank_nodes=("a",), parity=0, keep=1), group.clients["a"]
        payload = bytearray(random_payload(3 * SUM_BYTES, seed=(1,)))

        def write(step: int) -> None:
            payload[step] ^= 1
            write_payload(client, world, step=step, rank=0, payload=bytes(payload))
            group.await_protected(world, step)

        for step in (1, 2):
            write(step)
            client.follow(world, step, 0)
        for step in (3, 4):
            write(step)
        found = client.changed(world, 4, 0, base=(world.generation, 2))
        assert found is not None, "followed"
        assert found[0] == (0, SUM_BYTES)
        assert client.changed(world, 4, 0, base=(world.generation, 1)) is None, "followed no more"
        client.adopt(msgspec.structs.replace(world, generation=world.generation + 1), restore=None)
        assert not any(slot.pins for slot in group.sidecars["a"].core.slots.all())


def test_a_reader_that_is_silent_follows_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "FOLLOWED_S", 0.0)
    with sidecar_group(tmp_path, "a", threads=True) as group:
        world, client = group.adopt(rank_nodes=("a",), parity=0, keep=1), group.clients["a"]
        write_payload(client, world, step=1, rank=0, payload=b"x" * 100)
        group.await_protected(world, 1)
        client.follow(world, 1, 0)
        slots = group.sidecars["a"].core.slots
        wait_until(lambda: not any(slot.pins for slot in slots.all()), "it is let go")


def test_a_sidecar_names_the_run_that_changed(tmp_path: Path) -> None:
    with sidecar_group(tmp_path, "a", threads=True) as group:
        world = group.adopt(rank_nodes=("a",), parity=0)
        payload = bytearray(random_payload(3 * SUM_BYTES, seed=(1,)))
        write_payload(group.clients["a"], world, step=1, rank=0, payload=bytes(payload))
        payload[SUM_BYTES + 5] ^= 1
        write_payload(group.clients["a"], world, step=2, rank=0, payload=bytes(payload))
        group.await_protected(world, 2)
        found = group.clients["a"].changed(world, 2, 0, base=(world.generation, 1))
        assert found is not None
        assert found[0] == (SUM_BYTES, SUM_BYTES)
        assert all(at >= 3 * SUM_BYTES for at, _ in found[1:])
