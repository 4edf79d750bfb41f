"""Parity is right whatever is sent, lost, repeated, changed or damaged on the way to it."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sidecar_group import SidecarGroup, inventories, sidecar_group, wait_until

from ckpt.arena import HEADER_BYTES
from ckpt.budget import FULL_IN_FLIGHT, memory_need
from ckpt.errors import CkptError, NotFoundError, PeerError
from ckpt.isal import crc32c
from ckpt.sidecar import building, columns, row_file, writing
from ckpt.sidecar.messages import AskBytes, ReadRow
from ckpt.stripes import Geometry, restore_points
from ckpt.testing.blocks import INDEX_ROOM_BYTES, make_world, random_payload, write_payload
from ckpt.transport import Client
from ckpt.world import BlockSource, SnapshotWorld

MIB = 1 << 20
WAYS = pytest.mark.parametrize("by_wire", [False, True], ids=["mapped", "wire"])


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c", threads=True) as group:
        yield group


def send_over_the_wire(group: SidecarGroup, *nodes: str) -> None:
    """Have sidecars build their rows as if every peer were on another host."""
    for node in nodes or tuple(group.sidecars):
        group.sidecars[node].exchange.builder.host = f"host of {node}"


def write(group: SidecarGroup, world: SnapshotWorld, step: int, payloads: dict[int, bytes]) -> None:
    for rank, node in enumerate(world.rank_nodes):
        write_payload(group.clients[node], world, payloads[rank], step=step, rank=rank)


def counted(group: SidecarGroup, name: str) -> int:
    return sum(sidecar.core.counters[name] for sidecar in group.sidecars.values())


def check_rows(group: SidecarGroup, world: SnapshotWorld, step: int) -> None:
    """Compare every parity row with one encoded here, from what the slots hold."""
    key = (world.generation, step)
    entries = group.sidecars["a"].core.book.snapshots[key].entries
    geometry = Geometry(world, entries)
    blocks = {}
    for rank, node in enumerate(world.rank_nodes):
        slot = group.sidecars[node].core.slots.holding((*key, rank))
        assert slot is not None
        blocks[rank] = slot.view()
    for node, sidecar in group.sidecars.items():
        for stripe, row in geometry.rows_of(node):
            found = sidecar.parities.get(key, (stripe, row))
            assert found is not None
            wanted = np.zeros(geometry.row_bytes(stripe), dtype=np.uint8)
            codec = building.codec_named()(geometry.columns(stripe), geometry.m)
            for column in range(geometry.columns(stripe)):
                data = np.zeros_like(wanted)
                for span in geometry.spans(stripe, column, 0, len(wanted)):
                    part = blocks[span.rank][span.at : span.at + span.nbytes]
                    data[span.into : span.into + span.nbytes] = np.frombuffer(part, dtype=np.uint8)
                codec.encode_update(row, column, data.data, wanted.data)
            assert found.entry.crc32c == crc32c(wanted.data), (node, stripe, row)
            assert found.is_intact()


def rebuilt(group: SidecarGroup, world: SnapshotWorld, step: int, lost: str) -> dict[int, bytes]:
    """Lose a node; return what comes back of its blocks."""
    group.kill(lost, wipe=True)
    point = restore_points(inventories(group))[0][0]
    assert point.step == step
    found = {}
    for source in point.sources:
        if source.rebuilt:
            client = group.clients[source.node]
            nbytes = client.open_block(world, step, source).payload_bytes
            found[source.rank] = bytes(client.read(world, step, source.rank, [(0, nbytes)])[0])
    return found


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
    asked: list[int] = []

    def vanish(self: columns.Columns, key: tuple[int, int]) -> bool:
        asked.append(1)
        return len(asked) <= 6 and there(self, key)  # there when asked about, gone when asked for

    monkeypatch.setattr(columns.Columns, "_is_there", vanish)
    payloads[0] = random_payload(2 * MIB, seed=(9,))
    write(three, world, 2, payloads)
    three.await_protected(world, 2)
    check_rows(three, world, 2)
    assert len(asked) > 6


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


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


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
    monkeypatch.setattr(writing, "OVERTAKEN_S", 0.05)
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


def test_a_flipped_bit_in_a_row_file_is_found_before_it_is_used(three: SidecarGroup) -> None:
    world = three.adopt()
    payloads = {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)}
    write(three, world, 1, payloads)
    three.await_protected(world, 1)
    (row,) = three.sidecars["a"].parities.sealed()
    assert row.file is not None
    flip(row.file.path, HEADER_BYTES + 77)
    three.clients["a"].inventory()
    assert three.clients["a"].status()["counters"]["corrupt_parities"] == 1
    three.kill("c", wipe=True)
    points, reason = restore_points(inventories(three))
    assert points == [] or points[0].sources[2].rebuilt, reason


def answer_late(group: SidecarGroup, node: str, op: str) -> None:
    """Have a sidecar's answers to an operation come behind everybody else's."""
    kind, handler = group.sidecars[node]._ops[op]

    def late(request: Any, body: Any) -> None:
        threading.Timer(0.2, handler, (request, body)).start()

    group.sidecars[node]._ops[op] = (kind, late)


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


# -- room and time -------------------------------------------------------------------------------


def test_without_room_a_step_is_committed_and_protected_when_there_is_some(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = three.adopt()

    def full(_fd: int, _nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(row_file, "allocate", full)
        payloads = {rank: random_payload(100_000, seed=(rank,)) for rank in range(3)}
        write(three, world, 1, payloads)

        def is_said() -> bool:
            return all(client.status()["unprotected"] for client in three.clients.values())

        wait_until(is_said, "all say why the step is not protected")
        status = three.clients["a"].status()
        assert (status["committed"], status["protected"]) == (1, -1)
        assert "no room for a parity row" in status["unprotected"]["1/1"]
    three.await_protected(world, 1)
    assert three.clients["a"].status()["unprotected"] == {}
    check_rows(three, world, 1)


def test_rows_reuse_their_memory(three: SidecarGroup) -> None:
    world = three.adopt(keep=1)
    payloads = {rank: random_payload(300_000, seed=(rank,)) for rank in range(3)}
    paths = set()
    for step in range(1, 12):
        write(three, world, step, payloads)
        three.await_protected(world, step)
        paths |= {path.name for path in three.sidecars["a"].core.arena.directory.glob("*.row")}
    assert len(paths) <= 3
    status = three.clients["a"].status()
    assert status["bytes"]["parity"] <= 3 * 320_000
    assert {"seal", "exchange", "protect"} <= set(status["meters"])


def test_files_of_later_rows_are_made_ahead(three: SidecarGroup) -> None:
    world = three.adopt(keep=2)
    payloads = {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)}
    write(three, world, 1, payloads)
    three.await_protected(world, 1)
    directory = three.sidecars["a"].core.arena.directory

    def rows() -> set[str]:
        return {path.name for path in directory.glob("*.row")}

    wait_until(lambda: len(rows()) == 3, "there is a file for each kept step and for one more")
    before = rows()
    for step in range(2, 7):
        write(three, world, step, payloads)
        three.await_protected(world, step)
    assert rows() == before
    check_rows(three, world, 6)


def test_rows_being_built_side_by_side_are_in_the_declared_need(three: SidecarGroup) -> None:
    send_over_the_wire(three)
    world = three.adopt(keep=1)

    def write_new(step: int) -> None:
        write(three, world, step, {r: random_payload(MIB, seed=(step, r)) for r in range(3)})

    write_new(1)
    three.await_protected(world, 1)
    gate, answer = threading.Event(), three.sidecars["b"].core.submit

    def later(request: Any, work: Callable[[], None], **options: Any) -> None:
        if request is not None and request.op == "column_bytes":
            threading.Thread(target=lambda: (gate.wait(10), answer(request, work))).start()
            return
        answer(request, work, **options)

    three.sidecars["b"].core.submit = later  # type: ignore[method-assign]
    write_new(2)
    write_new(3)
    holder = three.sidecars["c"]
    try:
        wait_until(lambda: len(holder.parities._building) == 2, "rows of both are being built")
        taken = sum(path.stat().st_size for path in holder.core.arena.directory.glob("*.row"))
        counted = holder.parities.nbytes()
    finally:
        gate.set()
    lengths = dict.fromkeys(range(3), MIB + INDEX_ROOM_BYTES)
    need = memory_need(world, lengths, node="c", slots_per_rank=world.keep + FULL_IN_FLIGHT)
    assert counted == taken <= need.parity
    three.await_protected(world, 3)


def test_a_slow_peer_holds_up_nobody_elses_fragments(three: SidecarGroup) -> None:
    send_over_the_wire(three)
    world = three.adopt(rank_nodes=("a", "b"))
    gate, answer = threading.Event(), three.sidecars["b"].core.submit

    def slowly(request: Any, work: Callable[[], None], **options: Any) -> None:
        if request is not None and request.op in ("column", "column_bytes"):
            threading.Thread(target=lambda: (gate.wait(10), answer(request, work))).start()
            return
        answer(request, work, **options)

    three.sidecars["b"].core.submit = slowly  # type: ignore[method-assign]
    payloads = {rank: random_payload(100_000, seed=(rank,)) for rank in range(2)}
    write(three, world, 1, payloads)
    links = three.sidecars["c"].exchange._links
    wait_until(lambda: ("b", "fragments") in links, "the step is committed on c")
    wait_until(lambda: links["a", "fragments"].queued == 0, "what a has to give is had")
    status = three.clients["c"].status()["peers"]["b/fragments"]
    assert status["queued"] == 1 and status["oldest_s"] >= 0
    gate.set()
    three.await_protected(world, 1)
    check_rows(three, world, 1)


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


# -- answers and requests that lie -----------------------------------------------------------------


GARBAGE: dict[str, Callable[[dict[str, Any], bytes], tuple[Any, bytes]]] = {
    "no object": lambda _body, frame: ("nonsense", frame),
    "sums of odd length": lambda body, frame: (body, frame[:-1]),
    "sums missing": lambda body, _frame: (body, b""),
    "a span of another rank's column": lambda body, frame: (
        {**body, "spans": [{**each, "into": each["into"] + 4096} for each in body["spans"]]},
        frame,
    ),
    "a span before the block": lambda body, frame: (
        {**body, "spans": [{**each, "at": -4096} for each in body["spans"]]},
        frame,
    ),
    "changes outside the column": lambda body, frame: (
        {**body, "changed": [[0, 1 << 40]]},
        frame,
    ),
    "changes twice": lambda body, frame: ({**body, "changed": [[0, 100], [50, 200]]}, frame),
}


@WAYS
@pytest.mark.parametrize("how", GARBAGE)
def test_a_malformed_answer_is_said_and_asked_for_again(
    three: SidecarGroup, by_wire: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_wire:
        send_over_the_wire(three)
    call, garbled = Client.call, [0]

    def garbling(client: Client, op: str, *args: Any, **options: Any) -> Any:
        body, frames = call(client, op, *args, **options)
        if op == "column" and garbled[0] < 6:
            garbled[0] += 1
            body, frame = GARBAGE[how](body, bytes(frames[0]))
            return body, [memoryview(frame)]
        return body, frames

    world = three.adopt()
    payloads = {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)}
    with monkeypatch.context() as patch:
        patch.setattr(Client, "call", garbling)
        write(three, world, 1, payloads)
        three.await_protected(world, 1)
    check_rows(three, world, 1)


@pytest.mark.parametrize("ranges", [((-1, 5),), ((5, 1),), ((0, 1 << 50),), ((0, 9), (3, 12))])
def test_bytes_outside_a_column_are_refused(
    three: SidecarGroup, ranges: tuple[tuple[int, int], ...]
) -> None:
    world = three.adopt()
    write(three, world, 1, {rank: random_payload(100_000, seed=(rank,)) for rank in range(3)})
    three.await_protected(world, 1)
    owner = three.clients["b"]
    body = AskBytes(generation=1, step=1, stripe=0, column=0, ranges=ranges)
    with pytest.raises(CkptError, match="ranges"):
        owner.call("column_bytes", body, bulk=True)
    slots = three.sidecars["b"].core.slots.all()
    assert not any(slot.pins for slot in slots)


@pytest.mark.parametrize(("at", "nbytes"), [(-8, 8), (0, -1), (8, -16), (1 << 60, 1)])
def test_bytes_outside_a_row_are_refused(three: SidecarGroup, at: int, nbytes: int) -> None:
    world = three.adopt()
    write(three, world, 1, {rank: random_payload(100_000, seed=(rank,)) for rank in range(3)})
    three.await_protected(world, 1)
    (row,) = three.sidecars["a"].parities.sealed()
    body = ReadRow(
        generation=1, step=1, stripe=row.place[0], row=row.place[1], at=at, nbytes=nbytes
    )
    with pytest.raises(NotFoundError):
        three.clients["a"].call("row", body, bulk=True)


def test_the_memory_of_a_lost_node_is_let_go(three: SidecarGroup) -> None:
    world = three.adopt()
    write(three, world, 1, {rank: random_payload(MIB, seed=(rank,)) for rank in range(3)})
    three.await_protected(world, 1)
    maps = three.sidecars["a"].exchange.builder._maps
    assert len(maps._slots) >= 2
    for lost in ("b", "c"):
        three.kill(lost, wipe=True)
    alone = three.adopt(generation=2, parity=0, rank_nodes=("a",))
    write(three, alone, 2, {0: random_payload(MIB, seed=(2,))})
    three.await_protected(alone, 2)
    assert [path for path in maps._slots if not Path(path).exists()] == []


def test_each_row_that_is_not_sealed_says_why(three: SidecarGroup) -> None:
    world = three.adopt(rank_nodes=("a", "b"), parity=2)
    builder = three.sidecars["c"].exchange.builder
    for rank, node in ((0, "a"), (1, "b")):
        payload = random_payload(MIB, seed=(rank,))
        if rank == 1:
            slot = three.sidecars["a"].core.slots.holding((1, 1, 0))
            assert slot is not None
            flip(slot.file.path, HEADER_BYTES + 1000)
        write_payload(three.clients[node], world, payload, step=1, rank=rank)
    wait_until(lambda: bool(builder.status()["unprotected"]), "the holder says why")
    wait_until(lambda: len(builder._builds) == 1, "the other row is sealed")
    assert "rank 0" in builder.status()["unprotected"]["1/1"]


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
