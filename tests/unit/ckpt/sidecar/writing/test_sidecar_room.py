"""A node's memory: the declared budget and its two modes, a full file system, a new shape."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from doubles.blocks import make_block, make_world, random_payload, write_block
from sidecar_group import SidecarGroup, inventories, sidecar_group, wait_until, write_step

from holdfast.ckpt.errors import BudgetError, CapacityError, CkptError, FencedError, GivenUpError
from holdfast.ckpt.memory.arena import (
    FIXED_GRAIN_BYTES,
    FixedPart,
    SlotFile,
    arena_path,
    slot_capacity,
)
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.memory.records import RestorePoint, SnapshotWorld
from holdfast.ckpt.parity.budget import FULL_IN_FLIGHT, SMALL_IN_FLIGHT, memory_need
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.sidecar.core.book import Book, Release
from holdfast.ckpt.sidecar.core.slots import BlockSize
from holdfast.ckpt.sidecar.writing import room
from holdfast.ckpt.sidecar.writing.room import Fit, InFlightMode, fit
from holdfast.ckpt.testing.shards import INDEX_ROOM_BYTES, make_index

LENGTH = 100_000


@pytest.fixture
def two(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", threads=True) as group:
        yield group


def adopt(
    group: SidecarGroup, restore: RestorePoint | None = None, **changes: object
) -> SnapshotWorld:
    given = {"rank_nodes": ("a", "b"), "parity": 1, "keep": 1, "generation": 1, **changes}
    memory_bytes = given.pop("memory_bytes", 0)
    world = make_world(group.addresses(), run=group.run, **given)  # type: ignore[arg-type]
    world = msgspec.structs.replace(world, memory_bytes=memory_bytes)
    for client in group.clients.values():
        client.adopt(world, restore=restore)
    return world


def need(world: SnapshotWorld, length: int, in_flight: int) -> int:
    sizes = dict.fromkeys(range(len(world.rank_nodes)), slot_capacity(length + INDEX_ROOM_BYTES))
    return memory_need(world, sizes, node="a", slots_per_rank=world.keep + in_flight).total


def files_bytes(group: SidecarGroup, node: str = "a") -> int:
    total = 0
    for path in arena_path(group.run, node).glob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed since
            total += path.stat().st_size if path.suffix in (".slot", ".row") else 0
    return total


def test_the_larger_mode_that_fits_is_taken() -> None:
    world = make_world({"a": "tcp://h:1", "b": "tcp://h:2"}, parity=1, keep=2)
    lengths = {0: LENGTH, 1: LENGTH}
    sizes = {rank: BlockSize(nbytes=LENGTH) for rank in lengths}
    full = memory_need(world, lengths, node="a", slots_per_rank=2 + FULL_IN_FLIGHT)
    small = memory_need(world, lengths, node="a", slots_per_rank=2 + SMALL_IN_FLIGHT)
    for room_bytes, wanted in (
        (full.total, Fit(mode=InFlightMode.FULL, need=full)),
        (full.total - 1, Fit(mode=InFlightMode.SMALL, need=small)),
        (small.total, Fit(mode=InFlightMode.SMALL, need=small)),
        (small.total - 1, small),
    ):
        assert fit(world, sizes, node="a", room_bytes=room_bytes) == wanted


def test_a_slot_fits_what_it_holds_and_does_not_waste() -> None:
    length, double = BlockSize(nbytes=LENGTH), BlockSize(nbytes=2 * LENGTH)
    assert length.is_like(length)
    assert not length.is_like(double)
    assert not double.is_like(length)
    fixed = FixedPart(generation=1, rank=0, number=1, nbytes=FIXED_GRAIN_BYTES)
    behind = BlockSize(nbytes=LENGTH + fixed.nbytes, fixed=fixed)
    assert behind.file_bytes == length.file_bytes
    assert not behind.is_like(length) and not length.is_like(behind)


def test_a_budget_that_cannot_hold_the_state_is_refused_before_anything_is_made(
    two: SidecarGroup,
) -> None:
    world = adopt(two, memory_bytes=200_000)
    with pytest.raises(BudgetError, match=r"node a needs .* even in the smaller mode") as caught:
        write_block(two.clients["a"], world, step=1, rank=0, nbytes=LENGTH)
    for phrase in ("200,000 bytes are declared", "keep fewer snapshots (keep=1)", "more nodes"):
        assert phrase in str(caught.value)
    assert list(arena_path(two.run, "a").glob("*.slot")) == []


def test_a_state_that_outgrows_the_budget_later_is_left_out_until_it_fits_again(
    two: SidecarGroup,
) -> None:
    world = adopt(two, memory_bytes=need(adopt(two), LENGTH, FULL_IN_FLIGHT), generation=2)
    write_step(two, world, 1, sizes=(LENGTH, LENGTH))
    with pytest.raises(CapacityError, match=r"needs .* are declared for a node") as caught:
        write_block(two.clients["a"], world, step=2, rank=0, nbytes=40 * LENGTH)
    assert not isinstance(caught.value, BudgetError), "that would end the training"
    said = two.clients["a"].status()
    assert "are declared for a node" in said["memory"]["left_out"]
    assert said["counters"]["left_out"] == 1
    b = two.sidecars["b"].core.book
    wait_until(lambda: b.is_gone((2, 2)), "the other rank hears of it")
    assert two.clients["a"].protected_step(generation=2) == 1, "the one before stays"
    write_step(two, world, 3, sizes=(LENGTH, LENGTH))
    assert two.clients["a"].status()["memory"]["left_out"] is None


def test_a_node_that_joins_where_the_file_system_is_full_goes_on_without_snapshots(
    two: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = two.sidecars["a"].core
    world = adopt(two, generation=2)
    free_bytes = core.arena.free_bytes
    monkeypatch.setattr(core.arena, "free_bytes", lambda: 0)
    with pytest.raises(CapacityError, match="0 bytes free") as caught:
        write_block(two.clients["a"], world, step=1, rank=0, nbytes=LENGTH)
    assert not isinstance(caught.value, BudgetError), "others may give it back"
    monkeypatch.setattr(core.arena, "free_bytes", free_bytes)
    write_step(two, world, 2, sizes=(LENGTH, LENGTH))


def test_what_grows_with_the_first_steps_is_refused_like_what_is_there_at_the_start(
    two: SidecarGroup,
) -> None:
    world = adopt(two, memory_bytes=2_000_000)
    write_step(two, world, 1, sizes=(LENGTH, LENGTH))
    with pytest.raises(BudgetError, match="even in the smaller mode"):
        write_block(two.clients["a"], world, step=2, rank=0, nbytes=40 * LENGTH)


def test_a_file_system_that_is_too_small_is_said_up_front(
    two: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = two.sidecars["a"].core
    world = adopt(two)
    monkeypatch.setattr(core.arena, "free_bytes", lambda: 150_000)
    with pytest.raises(BudgetError, match=r"150,000 bytes free: enlarge it \(mount -o remount"):
        write_block(two.clients["a"], world, step=1, rank=0, nbytes=LENGTH)


def test_in_the_smaller_mode_a_snapshot_waits_for_the_one_before(two: SidecarGroup) -> None:
    world = adopt(two, memory_bytes=0)
    budget = need(world, LENGTH, SMALL_IN_FLIGHT)
    world = adopt(two, generation=2, memory_bytes=budget)
    write_step(two, world, 1, sizes=(LENGTH, LENGTH))
    status = two.clients["a"].status()
    assert status["memory"]["mode"] == "small"
    assert status["bytes"]["budget"] == budget
    write_block(two.clients["a"], world, step=2, rank=0, nbytes=LENGTH)
    with pytest.raises(CapacityError, match="no slot became free"):
        write_block(two.clients["a"], world, step=3, rank=0, nbytes=LENGTH, timeout_s=0.2)
    write_block(two.clients["b"], world, step=2, rank=1, nbytes=LENGTH)
    two.await_protected(world, 2)
    write_step(two, world, 4, sizes=(LENGTH, LENGTH))
    assert files_bytes(two) <= budget


@pytest.mark.parametrize("in_flight", [SMALL_IN_FLIGHT, FULL_IN_FLIGHT])
def test_a_growing_state_never_takes_more_than_was_declared(
    two: SidecarGroup, in_flight: int
) -> None:
    largest = 12 * LENGTH
    budget = need(adopt(two), largest, in_flight)
    world = adopt(two, generation=2, memory_bytes=budget)
    peaks, over = [0], threading.Event()

    def sample() -> None:
        while not over.is_set():
            peaks.append(max(files_bytes(two, node) for node in ("a", "b")))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        for step in range(1, 13):
            write_step(two, world, step, sizes=(step * LENGTH, step * LENGTH))
    finally:
        over.set()
        sampler.join()
    assert max(peaks) <= budget


def test_a_new_generation_finds_room_beside_what_it_restores_from(two: SidecarGroup) -> None:
    budget = need(adopt(two), LENGTH, SMALL_IN_FLIGHT)
    world = adopt(two, generation=2, memory_bytes=budget)
    write_step(two, world, 1, sizes=(LENGTH, LENGTH))
    write_step(two, world, 2, sizes=(LENGTH, LENGTH))
    point = two.clients["a"].locate(generation=2, step=2)
    again = adopt(two, point, generation=3, memory_bytes=budget)
    assert two.clients["a"].read(world, 2, 0, [(0, 10)])
    write_step(two, again, 3, sizes=(LENGTH, LENGTH))
    write_step(two, again, 4, sizes=(LENGTH, LENGTH))
    assert files_bytes(two) <= budget


def test_a_full_file_system_costs_snapshots_until_there_is_room(
    two: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = adopt(two)
    write_step(two, world, 1, sizes=(LENGTH, LENGTH))
    allocate, full = os.posix_fallocate, True

    def fallocate(fd: int, at: int, nbytes: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "full")
        allocate(fd, at, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    larger = 4 * LENGTH
    with pytest.raises(CapacityError, match="no room for a snapshot slot"):
        write_block(two.clients["a"], world, step=2, rank=0, nbytes=larger)
    said = two.clients["a"].status()
    assert "no room" in said["memory"]["left_out"]
    assert said["counters"]["left_out"] == 1

    def is_given_up() -> bool:
        return two.sidecars["b"].core.book.is_gone((1, 2))

    wait_until(is_given_up, "the other rank hears of it")
    with pytest.raises(GivenUpError):
        write_block(two.clients["b"], world, step=2, rank=1, nbytes=larger)
    assert two.clients["a"].protected_step(generation=1) == 1, "the one before stays"
    full = False
    write_step(two, world, 3, sizes=(larger, larger))
    assert two.clients["a"].status()["memory"]["left_out"] is None


class HeldAllocation:
    """Stops the allocation of the second piece of a file of this length until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
        self._allocate, self._size = os.posix_fallocate, HEADER_BYTES + slot_capacity(size_bytes)
        self.reached, self._go = threading.Event(), threading.Event()
        self.pieces = 0
        monkeypatch.setattr(os, "posix_fallocate", self)

    def __call__(self, fd: int, at: int, nbytes: int) -> None:
        if at and os.fstat(fd).st_size == self._size:
            self.pieces += 1
            self.reached.set()
            assert self._go.wait(30)
        self._allocate(fd, at, nbytes)

    def let_go(self) -> None:
        self._go.set()


def test_nobody_goes_on_making_a_slot_for_a_generation_that_is_over(
    two: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt(two)
    large, client = 50 * LENGTH, two.clients["a"]
    allocation, refused = HeldAllocation(monkeypatch, large), threading.Event()

    def acquire() -> None:
        with pytest.raises(FencedError, match="generation 1 is over"):
            client.acquire(generation=1, step=1, rank=0, size_bytes=large, timeout_s=30)
        refused.set()

    asking = threading.Thread(target=acquire)
    asking.start()
    assert allocation.reached.wait(30)
    with contextlib.closing(SidecarClient(two.addresses()["a"], two.key)) as other:
        other.fence(1)
    allocation.let_go()
    asking.join(30)
    assert refused.is_set()
    wait_until(lambda: not files_bytes(two), "what was made of it is gone")
    assert allocation.pieces == 1
    after = adopt(two, generation=2)
    write_step(two, after, 1, sizes=(large, large))


def test_no_slot_is_made_ahead_for_a_generation_that_is_over(
    two: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, large, client = adopt(two, rank_nodes=("a",), parity=0), 50 * LENGTH, two.clients["a"]
    payload = random_payload(large, seed=(1,))
    size_bytes = large + INDEX_ROOM_BYTES
    grant = client.acquire(generation=1, step=1, rank=0, size_bytes=size_bytes, timeout_s=30)
    before = files_bytes(two)
    allocation = HeldAllocation(monkeypatch, size_bytes)
    slot = SlotFile.open(grant.path)
    slot.block(large)[:] = payload
    index = make_index(payload, run=world.run, generation=1, step=1, rank=0, world_size=1)
    client.seal(slot_id=grant.slot_id, entry=slot.finish(index))
    slot.close()
    assert allocation.reached.wait(30), "one is made ahead"
    assert files_bytes(two) == 2 * before
    client.fence(1)
    allocation.let_go()
    wait_until(lambda: files_bytes(two) == before, "it is given up")
    assert allocation.pieces == 1


def acquire(two: SidecarGroup, step: int, *, patience_s: float) -> tuple[int, float]:
    """Acquire a slot of rank 0; return its number and how long that took."""
    began_s = time.monotonic()
    grant = two.clients["a"].acquire(
        generation=1,
        step=step,
        rank=0,
        size_bytes=LENGTH + INDEX_ROOM_BYTES,
        timeout_s=30,
        patience_s=patience_s,
    )
    return grant.slot_id, time.monotonic() - began_s


def slots_of(two: SidecarGroup) -> int:
    return len(list(arena_path(two.run, "a").glob("*.slot")))


def test_a_slot_is_lent_to_a_rank_that_can_wait_no_longer(two: SidecarGroup) -> None:
    world = adopt(two)
    write_step(two, world, 1, sizes=(LENGTH, LENGTH))
    write_block(two.clients["a"], world, step=2, rank=0, nbytes=LENGTH)  # rank 1 is late
    slot_id, took_s = acquire(two, 3, patience_s=0.3)
    assert took_s >= 0.3
    assert slots_of(two) == 3
    assert two.clients["a"].status()["counters"]["slots_lent"] == 1
    two.clients["a"].abandon(slot_id)


def test_a_rank_that_can_wait_gets_the_slot_of_the_step_that_is_superfluous(
    two: SidecarGroup,
) -> None:
    world = adopt(two)
    write_step(two, world, 1, sizes=(LENGTH, LENGTH))
    write_block(two.clients["a"], world, step=2, rank=0, nbytes=LENGTH)
    late = threading.Timer(
        0.1, write_block, (two.clients["b"], world), {"step": 2, "rank": 1, "nbytes": LENGTH}
    )
    late.start()
    acquire(two, 3, patience_s=30)
    late.join()
    assert slots_of(two) == 2
    assert "slots_lent" not in two.clients["a"].status()["counters"]


def test_a_lent_slot_goes_when_nobody_needed_it_for_a_while(
    two: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_LENT_FOR", 3)
    world = adopt(two)
    write_step(two, world, 1, sizes=(LENGTH, LENGTH))
    write_block(two.clients["a"], world, step=2, rank=0, nbytes=LENGTH)
    two.clients["a"].abandon(acquire(two, 3, patience_s=0)[0])
    write_block(two.clients["b"], world, step=2, rank=1, nbytes=LENGTH)
    two.await_protected(world, 2)
    for step in range(4, 9):
        write_step(two, world, step, sizes=(LENGTH, LENGTH))
        if step == 4:
            assert slots_of(two) == 3
    wait_until(lambda: slots_of(two) == 2, "the lent slot is removed")


def test_memory_is_given_back_when_the_state_shrinks(two: SidecarGroup) -> None:
    world = adopt(two)
    for step in range(1, 5):
        write_step(two, world, step, sizes=(20 * LENGTH, 20 * LENGTH))
    before = two.sidecars["a"].room.slot_bytes()
    for step in range(5, 10):
        write_step(two, world, step, sizes=(LENGTH, LENGTH))
    capacity = slot_capacity(LENGTH + INDEX_ROOM_BYTES) + HEADER_BYTES
    wait_until(lambda: two.sidecars["a"].room.slot_bytes() <= 3 * capacity, "it shrinks")
    assert before > 6 * capacity


def test_memory_is_given_back_when_a_node_has_fewer_ranks(two: SidecarGroup) -> None:
    world = adopt(two, rank_nodes=("a", "a", "a", "b"))
    for step in range(1, 5):
        write_step(two, world, step, sizes=(LENGTH,) * 4)
    point = two.clients["a"].locate(generation=1, step=4)
    world = adopt(two, point, generation=2, rank_nodes=("a", "b"))
    for step in range(5, 9):
        write_step(two, world, step, sizes=(LENGTH, LENGTH))
    assert len(two.sidecars["a"].core.slots.all()) <= 3
    assert len(list(arena_path(two.run, "a").glob("*.slot"))) <= 3


def test_unequal_ranks_do_not_take_each_others_memory(two: SidecarGroup) -> None:
    world = adopt(two, rank_nodes=("a", "a", "b"))
    sizes = (LENGTH, 5 * LENGTH, LENGTH)
    for step in range(1, 5):
        write_step(two, world, step, sizes=sizes)
    arena = two.sidecars["a"].core.arena
    made: list[str] = []
    arena.reach = made.append
    for step in range(5, 12):
        write_step(two, world, step, sizes=sizes)
    assert made.count("create.before") <= 2, "no fresh pages once the first snapshots are taken"


def fill_log(client: SidecarClient, *, nbytes: int = 100_000) -> str:
    """Append until there is no room; return the error's text."""
    client.log_open("tokens")
    for _ in range(1000):
        try:
            client.log_append("tokens", [bytes(nbytes)])
        except CapacityError as error:
            return str(error)
    raise AssertionError("there was always room")


def test_logs_have_a_share_of_what_was_declared_and_are_shown(two: SidecarGroup) -> None:
    world = adopt(two, memory_bytes=40 * LENGTH)
    client = two.clients["a"]
    said = fill_log(client)
    for phrase in ("may hold 500,000, one part in 8 of memory=4,000,000", "or raise memory="):
        assert phrase in said
    status = client.status()
    assert 0 < status["bytes"]["logs"] <= status["memory"]["logs_most_bytes"] == 5 * LENGTH
    assert status["memory"]["logs_refused"] == said
    client.log_truncate("tokens", client.log_open("tokens"))
    client.log_append("tokens", [b"x"])
    client.log_open("another")
    assert client.status()["memory"]["logs_refused"] is None
    write_step(two, world, 1, sizes=(LENGTH, LENGTH))


def test_logs_grow_only_into_what_slots_and_parity_leave(two: SidecarGroup) -> None:
    length = 16 * LENGTH
    small = need(adopt(two), length, SMALL_IN_FLIGHT)
    world = adopt(two, generation=2, memory_bytes=small + 2 * LENGTH)
    peaks, over = [0], threading.Event()

    def sample() -> None:
        while not over.is_set():
            peaks.append(max(files_bytes(two, node) for node in ("a", "b")))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        write_step(two, world, 1, sizes=(length, length))
        said = fill_log(two.clients["a"])
        for step in range(2, 6):
            write_step(two, world, step, sizes=(length, length))
    finally:
        over.set()
        sampler.join()
    assert f"slots and parity need {small:,} of memory={small + 2 * LENGTH:,}" in said
    assert max(peaks) <= world.memory_bytes


def test_for_logs_the_smaller_mode_is_entered(two: SidecarGroup) -> None:
    length = 16 * LENGTH
    full = need(adopt(two), length, FULL_IN_FLIGHT)
    world = adopt(two, generation=2, memory_bytes=full)
    for step in (1, 2, 3):
        write_step(two, world, step, sizes=(length, length))
    client = two.clients["a"]
    assert client.status()["memory"]["mode"] == "full"
    client.log_open("tokens")
    assert client.status()["memory"]["mode"] == "small"
    for step in (4, 5):
        write_step(two, world, step, sizes=(length, length))
    client.log_append("tokens", [bytes(LENGTH)])
    assert files_bytes(two) <= full


def test_what_logs_hold_is_said_where_a_snapshot_finds_no_room(two: SidecarGroup) -> None:
    length = 16 * LENGTH
    small = need(adopt(two), length, SMALL_IN_FLIGHT)
    world = adopt(two, generation=2, memory_bytes=small)
    two.clients["a"].log_open("tokens")
    with pytest.raises(CapacityError, match=r"are declared for a node, of which logs hold 65,536"):
        write_block(two.clients["a"], world, step=1, rank=0, nbytes=length)


def test_a_grant_names_the_slots_to_map_ahead(two: SidecarGroup) -> None:
    world = adopt(two)
    for step in range(1, 4):
        write_step(two, world, step, sizes=(LENGTH, LENGTH))
    client = two.clients["a"]
    grant = client.acquire(
        generation=1, step=4, rank=0, size_bytes=LENGTH + INDEX_ROOM_BYTES, timeout_s=5
    )
    free = [slot for slot in two.sidecars["a"].core.slots.all() if slot.key is None]
    assert set(grant.ahead) == {str(slot.file.path) for slot in free}
    assert grant.path not in grant.ahead


def test_where_memory_is_scarce_old_snapshots_go_but_never_the_one_restored_from() -> None:
    old = make_world({"a": "tcp://h:1"}, parity=0, keep=2, generation=1)
    book = Book()
    for step in (1, 2, 3):
        entry, _ = make_block(random_payload(100, seed=(step,)), step=step)
        book.readopt(old, entry, committed=True)
    book.world = msgspec.structs.replace(old, generation=2)
    assert book.shed() == [Release(key=(1, 1))]
    assert book.shed() == [Release(key=(1, 2))]
    assert book.shed() == []
    assert set(book.snapshots) == {(1, 3)}


def test_a_lost_block_is_rebuilt_within_the_budget_where_free_slots_can_make_room(
    tmp_path: Path,
) -> None:
    with sidecar_group(tmp_path, "a", "b", "c", threads=True) as group:
        sizes = (LENGTH, LENGTH, 4 * LENGTH)
        world = adopt(group, rank_nodes=("a", "b", "c"))
        for step in range(1, 5):
            write_step(group, world, step, sizes=sizes)
        point = restore_points(inventories(group))[0][0]
        group.kill("c", wipe=True)
        adopt(group, restore=point, generation=2)
        before = files_bytes(group)
        budget = before + 4 * LENGTH  # not enough for the block and its index beside free slots
        adopt(group, restore=point, generation=3, memory_bytes=budget)
        point = restore_points(inventories(group))[0][0]
        (source,) = [each for each in point.sources if each.rebuilt]
        group.clients[source.node].open_block(point.world, point.step, source)
        assert source.node == "a"
        assert before < files_bytes(group) <= budget


class _LetsOthersIn:
    """A lock after whose release every thread that waits for it has its turn."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        time.sleep(0.002)


def test_ranks_that_ask_at_once_get_a_slot_each(two: SidecarGroup) -> None:
    core = two.sidecars["a"].core
    core.lock = _LetsOthersIn(core.lock)  # type: ignore[assignment,arg-type]
    world = adopt(two, rank_nodes=("a",) * 6, parity=0)
    for step in range(1, 4):  # each larger than the slots that there are
        found: list[int] = []
        failed: list[Exception] = []

        def acquire(
            rank: int, step: int = step, found: list[int] = found, failed: list[Exception] = failed
        ) -> None:
            try:
                grant = two.clients["a"].acquire(
                    generation=world.generation,
                    step=step,
                    rank=rank,
                    size_bytes=step * (1 << 20),
                    timeout_s=10.0,
                )
                found.append(grant.slot_id)
            except CkptError as error:
                failed.append(error)

        ranks = [threading.Thread(target=acquire, args=(rank,)) for rank in range(6)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        assert failed == []
        assert len(set(found)) == 6
        for slot_id in found:
            two.clients["a"].abandon(slot_id)
