"""A lost block is rebuilt correctly from any fragments, and only its wanted part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from doubles.blocks import random_payload
from rows import MIB, flip, rebuilt, send_over_the_wire, write
from sidecar_group import SidecarGroup, inventories, sidecar_group

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.geometry.shard_index import ChunkRef
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.memory.records import BlockSource, RestorePoint, SnapshotWorld
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.recovery import memory_source
from holdfast.ckpt.recovery.memory_source import MemorySource
from holdfast.ckpt.sidecar.core.core import Core
from holdfast.ckpt.sidecar.reading.lost import LostBlock
from holdfast.ckpt.transport import Client


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c", threads=True) as group:
        yield group


def answer_late(group: SidecarGroup, node: str, op: str) -> None:
    """Have a sidecar's answers to an operation come behind everybody else's."""
    kind, handler = group.sidecars[node]._ops[op]

    def late(request: Any, body: Any) -> None:
        threading.Timer(0.2, handler, (request, body)).start()

    group.sidecars[node]._ops[op] = (kind, late)


@dataclass
class Loss:
    """Four ranks, of which that of node b is lost, and where the others are."""

    group: SidecarGroup
    world: SnapshotWorld
    point: RestorePoint
    payload: bytes

    @property
    def helper(self) -> str:
        return self.point.sources[1].node

    @property
    def core(self) -> Core:
        return self.group.sidecars[self.helper].core

    def source(self) -> MemorySource:
        return MemorySource(
            self.point,
            local=self.group.clients["a"],
            local_node="a",
            addresses=self.group.addresses(),
            key=self.group.key,
        )

    def ref(self, half: int) -> ChunkRef:
        with self.source() as source:
            return list(source.indexes()[1].chunks())[half]

    def half(self, number: int) -> bytes:
        at = len(self.payload) // 2
        return self.payload[at:] if number else self.payload[:at]


@pytest.fixture
def loss(tmp_path: Path) -> Iterator[Loss]:
    with sidecar_group(tmp_path, "a", "b", "c", "d", threads=True) as group:
        world = group.adopt(parity=2)
        payloads = {rank: random_payload(MIB + 8 * rank, seed=(rank,)) for rank in range(4)}
        write(group, world, 1, payloads)
        group.await_protected(world, 1)
        group.kill("b", wipe=True)
        point = restore_points(inventories(group))[0][0]
        yield Loss(group, world, point, payloads[1])


def test_a_little_of_a_lost_block_is_read_without_rebuilding_it(loss: Loss) -> None:
    client = loss.group.clients[loss.helper]
    handle = client.open_block(loss.world, 1, loss.point.sources[1], in_parts=True)
    assert handle.in_parts and not handle.path and handle.payload_bytes == len(loss.payload)
    ranges = [(0, 100), (MIB // 2 - 33, 66), (MIB, 8), (5, 0)]
    parts = client.read(loss.world, 1, 1, ranges)
    assert [bytes(part) for part in parts] == [loss.payload[at : at + n] for at, n in ranges]
    assert loss.core.slots.holding((1, 1, 1)) is None
    with pytest.raises(CkptError):
        client.read(loss.world, 1, 1, [(2 * MIB, 1)])


def test_what_is_asked_for_much_is_rebuilt_after_all(loss: Loss) -> None:
    client = loss.group.clients[loss.helper]
    client.open_block(loss.world, 1, loss.point.sources[1], in_parts=True)
    for at in range(0, MIB, MIB // 4):
        (part,) = client.read(loss.world, 1, 1, [(at, MIB // 4)])
        assert part == loss.payload[at : at + MIB // 4]
    assert loss.core.counters["read_in_parts"] == 2
    assert loss.core.slots.holding((1, 1, 1)) is not None
    assert not client.open_block(loss.world, 1, loss.point.sources[1], in_parts=True).in_parts


def test_a_rebuilt_block_is_given_out_before_its_fragments_are_closed(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, closed, waited = threading.Event(), threading.Event(), []
    close = LostBlock.close

    def close_late(lost: LostBlock) -> None:
        waited.append(answered.wait(20))
        close(lost)
        closed.set()

    monkeypatch.setattr(LostBlock, "close", close_late)
    client = loss.group.clients[loss.helper]
    assert client.open_block(loss.world, 1, loss.point.sources[1]).path
    answered.set()
    assert closed.wait(20) and waited == [True]


@pytest.mark.parametrize("limit", [1, 4])
def test_a_reader_of_one_tensor_decodes_no_more_than_is_worth_it(
    loss: Loss, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(memory_source, "_WHOLE_FROM", limit)
    with loss.source() as source:
        ((_, found),) = source.read([loss.ref(1)])
        assert found == loss.half(1)
    assert (loss.core.slots.holding((1, 1, 1)) is None) == (limit == 1)


def test_nothing_is_rebuilt_of_a_block_that_nobody_wants(loss: Loss) -> None:
    with loss.source() as source:
        first = next(source.indexes()[0].chunks())
        assert len(list(source.read([first]))) == 1
    assert loss.core.counters["rebuilt"] == 0


def test_a_node_lost_between_opening_and_reading_is_done_without(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_source, "_WHOLE_FROM", 1)
    send_over_the_wire(loss.group)
    answer_late(loss.group, "c", "holdings")  # what a and d have is enough
    with loss.source() as source:
        ref = next(source.indexes()[1].chunks())
        loss.group.kill("d", wipe=True)
        ((_, found),) = source.read([ref])
        assert found == loss.half(0)
    assert loss.core.counters["rebuilt"] == 1


def test_parts_decoded_from_changed_fragments_are_not_given_out(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_source, "_WHOLE_FROM", 1)
    answer_late(loss.group, "c", "holdings")
    with loss.source() as source:
        ref = next(source.indexes()[1].chunks())
        for row in loss.group.sidecars["d"].parities.sealed((1, 1)):
            assert row.buffer is not None
            row.buffer[100] ^= 1
        slot = loss.group.sidecars["d"].core.slots.holding((1, 1, 3))
        assert slot is not None
        for at in (100, MIB // 2 + 4000):
            flip(slot.file.path, HEADER_BYTES + at)
        ((_, found),) = source.read([ref])
        assert found == loss.half(0)
    assert loss.core.counters["corrupt_fragments"] == 1


def test_another_set_of_fragments_is_tried_when_a_rebuild_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sidecar_group(tmp_path, "a", "b", "c", "d", threads=True) as group:
        world = group.adopt(parity=2)
        payloads = {rank: random_payload(MIB + 7 * rank, seed=(rank,)) for rank in range(4)}
        write(group, world, 1, payloads)
        group.await_protected(world, 1)
        group.kill("b", wipe=True)
        point = restore_points(inventories(group))[0][0]
        for row in group.sidecars["d"].parities.sealed((1, 1)):  # after the inventory's check
            assert row.buffer is not None
            row.buffer[100] ^= 1
        slot = group.sidecars["d"].core.slots.holding((1, 1, 3))
        assert slot is not None
        for at in (100, MIB // 2 + 4000):
            flip(slot.file.path, HEADER_BYTES + at)
        answer_late(group, "c", "holdings")
        source = point.sources[1]
        helper = "a"
        client = group.clients[helper]
        client.open_block(world, 1, BlockSource(rank=1, node=helper, rebuilt=source.rebuilt))
        assert client.read(world, 1, 1, [(0, len(payloads[1]))])[0] == payloads[1]
        assert "without the fragments of ['d']" in caplog.text
        assert group.sidecars[helper].core.counters["corrupt_fragments"] == 1
        assert group.sidecars[helper].core.spoiled == set()


def test_what_a_peer_says_to_hold_beyond_the_group_is_passed_over(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = three.adopt()
    payloads = {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)}
    write(three, world, 1, payloads)
    three.await_protected(world, 1)
    call = Client.call

    def lying(client: Client, op: str, *args: Any, **options: Any) -> Any:
        body, frames = call(client, op, *args, **options)
        if op == "holdings":
            entry, parity = body["sealed"][0], body["parities"][0]
            body["sealed"] += [{**entry, "rank": 99}, {**entry, "rank": -1}, {**entry, "step": 7}]
            body["parities"] = [
                *({**parity, "stripe": stripe} for stripe in (-1, -3, 3)),
                *({**parity, "row": row} for row in (-1, 1)),
                *body["parities"],
            ]
            body["row_files"] = [*[None] * 5, *body["row_files"]]
        return body, frames

    with monkeypatch.context() as patch:
        patch.setattr(Client, "call", lying)
        assert rebuilt(three, world, 1, "c") == {2: payloads[2]}
