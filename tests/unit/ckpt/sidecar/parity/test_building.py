"""Parity is right although fragments are lost, repeated, changed or damaged on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from doubles.blocks import make_world, random_payload, write_payload
from rows import MIB, WAYS, check_rows, counted, flip, rebuilt, send_over_the_wire, write
from sidecar_group import SidecarGroup, inventories, sidecar_group, wait_until

from holdfast.ckpt.errors import CorruptError, PeerError
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.parity.stripes import Geometry, restore_points
from holdfast.ckpt.sidecar.parity import builder as building
from holdfast.ckpt.sidecar.parity import columns
from holdfast.ckpt.sidecar.writing import operations
from holdfast.ckpt.transport import Client


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c", threads=True) as group:
        yield group


# -- what is sent --------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("parity", [1, 2])
def test_rows_hold_what_the_columns_add_up_to(
    three: SidecarGroup, by_wire: bool, parity: int
) -> None:
    if by_wire:
        send_over_the_wire(three)
    world = three.adopt(rank_nodes=("a", "a", "b", "c"), parity=parity)
    sizes = (3 * MIB + 1, 5, 700_000, 2 * MIB)
    for step in (1, 2, 3):
        payloads = {r: random_payload(n, seed=(step, r)) for r, n in enumerate(sizes)}
        write(three, world, step, payloads)
        three.await_protected(world, step)
        check_rows(three, world, step)
    assert bool(counted(three, "fragment_bytes_sent")) == by_wire
    assert bool(counted(three, "fragment_bytes_mapped")) != by_wire
    assert rebuilt(three, world, 3, "a") == {0: payloads[0], 1: payloads[1]}


def test_what_did_not_change_is_not_sent(three: SidecarGroup) -> None:
    send_over_the_wire(three)
    world = three.adopt()
    payloads = {rank: random_payload(4 * MIB, seed=(rank,)) for rank in range(3)}
    write(three, world, 1, payloads)
    three.await_protected(world, 1)
    first = counted(three, "fragment_bytes_sent")
    assert first >= 12 * MIB
    write(three, world, 2, payloads)
    three.await_protected(world, 2)
    assert counted(three, "fragment_bytes_sent") - first < 1 * MIB  # the runs with the indexes
    assert counted(three, "fragment_bytes_spared") > 11 * MIB
    check_rows(three, world, 2)
    assert rebuilt(three, world, 2, "b") == {1: payloads[1]}


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_parity_stays_right_while_random_parts_change(three: SidecarGroup, lost: str) -> None:
    send_over_the_wire(three)
    rng = random.Random(lost)
    world = three.adopt(keep=rng.choice((1, 2)))
    payloads = {rank: bytearray(random_payload(2 * MIB, seed=(rank,))) for rank in range(3)}
    for step in range(1, 11):
        for payload in payloads.values():
            for _ in range(rng.randint(0, 2)):
                at, nbytes = rng.randrange(len(payload)), rng.choice((1, 100, 300_000))
                part = rng.randbytes(nbytes)[: len(payload) - at]
                payload[at : at + len(part)] = part
        write(three, world, step, {rank: bytes(each) for rank, each in payloads.items()})
        three.await_protected(world, step)
        check_rows(three, world, step)
    assert counted(three, "fragment_bytes_spared") > 0
    rank = world.rank_nodes.index(lost)
    assert rebuilt(three, world, 10, lost) == {rank: bytes(payloads[rank])}


def test_a_base_that_vanishes_is_done_without(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_over_the_wire(three)
    world = three.adopt()
    payloads = {rank: random_payload(2 * MIB, seed=(rank,)) for rank in range(3)}
    write(three, world, 1, payloads)
    three.await_protected(world, 1)
    there = columns.Columns._is_there
    requests: list[int] = []

    def vanish(self: columns.Columns, key: tuple[int, int]) -> bool:
        requests.append(1)
        # there when asked about, gone when asked for
        return len(requests) <= 6 and there(self, key)

    monkeypatch.setattr(columns.Columns, "_is_there", vanish)
    payloads[0] = random_payload(2 * MIB, seed=(9,))
    write(three, world, 2, payloads)
    three.await_protected(world, 2)
    check_rows(three, world, 2)
    assert len(requests) > 6


def test_a_damaged_base_is_done_without(three: SidecarGroup) -> None:
    send_over_the_wire(three)
    world = three.adopt()
    payloads = {rank: random_payload(2 * MIB, seed=(rank,)) for rank in range(3)}
    write(three, world, 1, payloads)
    three.await_protected(world, 1)
    for sidecar in three.sidecars.values():
        for row in sidecar.parities.sealed():
            assert row.buffer is not None
            row.buffer[12_345] ^= 1
    write(three, world, 2, payloads)
    three.await_protected(world, 2)
    check_rows(three, world, 2)


def test_fragments_stay_in_their_group_and_each_group_loses_a_node(tmp_path: Path) -> None:
    with sidecar_group(tmp_path, "a", "b", "c", "d", "e", threads=True) as group:
        world = make_world(group.addresses(), run=group.run, parity=1)
        world = msgspec.structs.replace(world, groups=(("a", "d"), ("b", "c", "e")))
        for client in group.clients.values():
            client.adopt(world, restore=None)
        payloads = {rank: random_payload(300_000 + rank, seed=(rank,)) for rank in range(5)}
        write(group, world, 1, payloads)
        group.await_protected(world, 1)
        check_rows(group, world, 1)
        links = group.sidecars["a"].exchange._links
        assert {node for node, purpose in links if purpose == "fragments"} == {"d"}
        group.kill("d", wipe=True)
        assert rebuilt(group, world, 1, "b") == {1: payloads[1], 3: payloads[3]}


def test_with_one_column_a_row_is_a_copy(three: SidecarGroup) -> None:
    world = make_world(three.addresses(), run=three.run, parity=1)
    world = msgspec.structs.replace(world, columns=1)
    for client in three.clients.values():
        client.adopt(world, restore=None)
    payloads = {rank: random_payload(300_000 + rank, seed=(rank,)) for rank in range(3)}
    write(three, world, 1, payloads)
    three.await_protected(world, 1)
    check_rows(three, world, 1)
    assert rebuilt(three, world, 1, "c") == {2: payloads[2]}


@pytest.mark.parametrize("parity", [1, 2])
def test_what_is_here_is_mapped_while_the_rest_travels(three: SidecarGroup, parity: int) -> None:
    three.sidecars["c"].core.host = "far away"
    world = three.adopt(parity=parity)
    for step in (1, 2):
        payloads = {rank: random_payload(MIB + rank, seed=(rank, step)) for rank in range(3)}
        write(three, world, step, payloads)
        three.await_protected(world, step)
        check_rows(three, world, step)
    sent = counted(three, "fragment_bytes_sent")
    entries = three.sidecars["a"].core.book.snapshots[1, 2].entries
    geometry = Geometry(world, entries)
    crossing = sum(
        geometry.filled_bytes(stripe, column)
        for stripe in range(geometry.n)
        for column in range(geometry.columns(stripe))
        for row in range(geometry.m)
        if geometry.nodes.index("c")
        in (
            geometry.node_of(stripe, column),
            geometry.node_of(stripe, geometry.columns(stripe) + row),
        )
    )
    assert crossing <= sent < crossing * 2 + MIB // 8  # two steps, whose indexes differ in length
    assert rebuilt(three, world, 2, "a") == {0: payloads[0]}


def test_where_little_changed_elsewhere_only_differences_travel(three: SidecarGroup) -> None:
    three.sidecars["c"].core.host = "far away"
    world = three.adopt()
    payloads = {rank: random_payload(8 * MIB, seed=(rank,)) for rank in range(3)}
    for step in (1, 2):
        write(three, world, step, payloads)
        three.await_protected(world, step)
        check_rows(three, world, step)
        if step == 1:
            before = counted(three, "fragment_bytes_sent")
            payloads[2] = random_payload(1000, seed=(9,)) + payloads[2][1000:]
    assert counted(three, "fragment_bytes_sent") - before < 2 * MIB


# -- what goes wrong on the way ------------------------------------------------------------------


def unreliable(rng: random.Random) -> Callable[..., Any]:
    """Return `Client.call` over a network that loses, repeats and damages messages."""
    call = Client.call

    def lossy(self: Client, op: str, *arguments: Any, **options: Any) -> Any:
        if op not in ("column", "column_bytes", "sealed", "row_sealed"):
            return call(self, op, *arguments, **options)
        if rng.random() < 0.2:
            raise PeerError("lost on the way there")
        answer = call(self, op, *arguments, **options)
        if rng.random() < 0.2:
            answer = call(self, op, *arguments, **options)
        if rng.random() < 0.2:
            raise PeerError("lost on the way back")
        if op == "column_bytes" and rng.random() < 0.2:
            body, frames = answer
            damaged = bytearray(frames[0])
            damaged[rng.randrange(len(damaged))] ^= 1
            return body, [memoryview(damaged)]
        return answer

    return lossy


@WAYS
@pytest.mark.parametrize("seed", range(3))
def test_lost_repeated_and_damaged_messages_change_nothing(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch, by_wire: bool, seed: int
) -> None:
    monkeypatch.setattr(building, "PART_BYTES", 300_000)
    if by_wire:
        send_over_the_wire(three)
    monkeypatch.setattr(Client, "call", unreliable(random.Random(seed)))
    world = three.adopt()
    for step in (1, 2):
        payloads = {rank: random_payload(MIB + rank, seed=(rank, step // 2)) for rank in range(3)}
        write(three, world, step, payloads)
        three.await_protected(world, step)
        check_rows(three, world, step)


def test_an_answer_that_comes_twice_is_added_once(three: SidecarGroup) -> None:
    send_over_the_wire(three)
    builder = three.sidecars["a"].exchange.builder
    add, tasks = builder._add, list[tuple[Any, ...]]()

    def twice(*arguments: Any) -> None:
        tasks.append(arguments)
        add(*arguments)
        add(*arguments)

    builder._add = twice  # type: ignore[method-assign]
    world = three.adopt()
    write(three, world, 1, {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)})
    three.await_protected(world, 1)
    check_rows(three, world, 1)
    for arguments in tasks:  # and so is one that comes when the row is long sealed
        add(*arguments)
    check_rows(three, world, 1)


@WAYS
def test_bytes_that_changed_since_the_seal_never_enter_parity(
    three: SidecarGroup, by_wire: bool
) -> None:
    if by_wire:
        send_over_the_wire(three)
    world = three.adopt()
    payloads = {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)}
    for rank, node in ((0, "a"), (1, "b")):
        write_payload(three.clients[node], world, payloads[rank], step=1, rank=rank)
    slot = three.sidecars["b"].core.slots.holding((1, 1, 1))
    assert slot is not None
    for at in (1000, MIB - 1000):  # both pieces
        flip(slot.file.path, HEADER_BYTES + at)
    write_payload(three.clients["c"], world, payloads[2], step=1, rank=2)

    def is_said() -> bool:
        return all(three.clients[node].status()["unprotected"] for node in ("a", "c"))

    wait_until(is_said, "the holders say why the step is not protected")
    (why,) = three.clients["a"].status()["unprotected"].values()
    assert "rank 1" in why and "node b" in why
    assert three.clients["a"].protected_step(generation=1) == -1
    write(three, world, 2, payloads)
    three.await_protected(world, 2)
    check_rows(three, world, 2)


def test_steps_that_can_never_be_protected_do_not_hold_their_slots(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "OVERTAKEN_S", 0.05)
    world = three.adopt(keep=1)
    payloads = {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)}
    for step in range(1, 11):
        for rank, node in ((0, "a"), (1, "b")):
            write_payload(three.clients[node], world, payloads[rank], step=step, rank=rank)
        if step % 2:
            slot = three.sidecars["b"].core.slots.holding((1, step, 1))
            assert slot is not None
            for at in (1000, MIB - 1000):
                flip(slot.file.path, HEADER_BYTES + at)
        write_payload(three.clients["c"], world, payloads[2], step=step, rank=2)
        if step % 2 == 0:
            three.await_protected(world, step)
    check_rows(three, world, 10)


def test_what_a_flipped_bit_in_a_row_file_spoils_is_refused_and_promised_no_more(
    three: SidecarGroup,
) -> None:
    world = three.adopt()
    payloads = {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)}
    write(three, world, 1, payloads)
    three.await_protected(world, 1)
    (row,) = three.sidecars["a"].parities.sealed()
    assert row.file is not None
    flip(row.file.path, HEADER_BYTES + 77)
    three.kill("c", wipe=True)
    (point, *_), reason = restore_points(inventories(three))
    source = point.sources[2]
    assert source.rebuilt, reason
    with pytest.raises(CorruptError, match="rank 2"):
        three.clients[source.node].open_block(world, 1, source)
    assert restore_points(inventories(three))[0] == []
