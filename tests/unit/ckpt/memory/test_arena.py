"""Slot files and arena directories: headers, takeover by a successor, locks, sweeping."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from doubles.blocks import make_block, random_payload

from holdfast.ckpt.errors import CapacityError, CorruptError, FencedError, UnsafePathError
from holdfast.ckpt.memory.arena import (
    Arena,
    SlotFile,
    SlotHeader,
    arena_path,
    hold,
    is_held,
    run_digest,
    sweep,
    take_away,
)
from holdfast.ckpt.memory.block import SlotState, block_bytes, verify_block
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.testing.shards import make_index

RUN = run_digest("r")


def write(slot: SlotFile, *, step: int = 1, nbytes: int = 1001) -> BlockEntry:
    payload = random_payload(nbytes, seed=(step,))
    slot.block(nbytes)[:] = payload
    return slot.finish(make_index(payload, run="r", generation=1, step=step, rank=0, world_size=1))


def test_a_header_survives_mapping_the_file_again(tmp_path: Path) -> None:
    slot = SlotFile.create(tmp_path / "a.slot", 5000)
    entry = write(slot)
    slot.write_header(SlotHeader.of(entry, SlotState.SEALED), run=RUN)
    again = SlotFile.open(tmp_path / "a.slot")
    header = again.read_header(run=RUN)
    assert header is not None
    assert (header.state, header.entry()) == (SlotState.SEALED, entry)
    verify_block(again.block(block_bytes(entry)), entry, origin="a")


def test_a_header_of_another_run_is_no_header(tmp_path: Path) -> None:
    slot = SlotFile.create(tmp_path / "a.slot", 5000)
    slot.write_header(SlotHeader.of(write(slot), SlotState.SEALED), run=RUN)
    assert slot.read_header(run=run_digest("other")) is None


def test_a_header_cut_off_at_any_byte_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "a.slot"
    slot = SlotFile.create(path, 5000)
    entry = write(slot)
    states = [SlotState.EMPTY, SlotState.WRITING, SlotState.SEALED, SlotState.COMMITTED]
    slot.write_header(SlotHeader(state=SlotState.EMPTY), run=RUN)
    for before, after in pairwise([*states, SlotState.EMPTY]):
        old = path.read_bytes()[:HEADER_BYTES]
        slot.write_header(SlotHeader.of(entry, after), run=RUN)
        new = path.read_bytes()[:HEADER_BYTES]
        changed = [at for at in range(HEADER_BYTES) if old[at] != new[at]]
        for cut in changed:
            with path.open("r+b") as file:
                file.write(new[:cut] + old[cut:])
            header = SlotFile.open(path).read_header(run=RUN)
            assert header is not None and header.state is before
        with path.open("r+b") as file:
            file.write(new)
        header = SlotFile.open(path).read_header(run=RUN)
        assert header is not None and header.state is after


def test_a_block_larger_than_its_slot_is_refused(tmp_path: Path) -> None:
    slot = SlotFile.create(tmp_path / "a.slot", 100)
    with pytest.raises(CapacityError, match="do not fit"):
        slot.block(slot.capacity + 1)


def test_shared_memory_without_room_is_a_capacity_error_with_the_remedy(tmp_path: Path) -> None:
    free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
    path = Path("/dev/shm") / f"holdfast-test-{os.getpid()}.slot"
    with pytest.raises(CapacityError, match="enlarge it"):
        SlotFile.create(path, free + (1 << 40))
    assert not path.exists()


def test_any_flipped_byte_of_a_block_is_detected() -> None:
    entry, block = make_block(random_payload(333, seed=(1,)))
    verify_block(memoryview(block), entry, origin="here")
    padding = range(333, 336)
    for at in range(len(block)):
        bad = bytearray(block)
        bad[at] ^= 0x10
        if at in padding:
            continue
        with pytest.raises(CorruptError, match="here"):
            verify_block(memoryview(bad), entry, origin="here")


def test_a_successor_finds_sealed_slots_and_removes_the_rest(tmp_path: Path) -> None:
    arena = Arena.open(tmp_path / "holdfast-r-n", run="r")
    states = (SlotState.EMPTY, SlotState.WRITING, SlotState.SEALED, SlotState.COMMITTED)
    for step, state in enumerate(states):
        slot = arena.create(3000)
        slot.write_header(SlotHeader.of(write(slot, step=step), state), run=arena.run)
    foreign = arena.create(3000)
    foreign.write_header(
        SlotHeader.of(write(foreign, step=9), SlotState.SEALED), run=run_digest("other")
    )
    (arena.directory / "short.slot").write_bytes(b"x")
    arena.release()
    after = Arena.open(tmp_path / "holdfast-r-n", run="r")
    found = [(entry.step, state) for _, entry, state in after.scan()]
    assert found == [(2, SlotState.SEALED), (3, SlotState.COMMITTED)]
    assert len(list(after.directory.glob("*.slot"))) == 2
    fresh = after.create(10)
    assert fresh.path.exists()
    after.remove()
    assert not after.directory.exists()


def test_sweep_takes_only_what_nobody_holds(tmp_path: Path) -> None:
    owned, left = tmp_path / "holdfast-a-n", tmp_path / "holdfast-b-n"
    other = tmp_path / "something-else"
    other.mkdir()
    fd, lost = hold(owned), hold(left)
    os.close(lost)
    assert sweep(tmp_path) == [left]
    assert owned.exists()
    assert other.exists()
    os.close(fd)
    assert sweep(tmp_path) == [owned]


def test_what_others_may_have_prepared_is_neither_used_nor_swept(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "thesis").mkdir(parents=True)
    opened, linked = tmp_path / "holdfast-a-n", tmp_path / "holdfast-b-n"
    opened.mkdir()
    opened.chmod(0o777)
    (opened / "lock").symlink_to(precious / "made")
    linked.symlink_to(precious)
    theirs = tmp_path / "holdfast-c-n"
    theirs.mkdir(mode=0o700)
    (theirs / "lock").touch()
    if os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
        with pytest.raises(UnsafePathError, match="belongs to user 65534"):
            hold(theirs)
        assert sweep(tmp_path, exactly=theirs.name) == []
    for path in (opened, linked):
        with pytest.raises(UnsafePathError, match=path.name):
            Arena.open(path, run="r")
        assert sweep(tmp_path, exactly=path.name) == []
    sweep(tmp_path)
    assert opened.exists()
    assert [path.name for path in precious.iterdir()] == ["thesis"]


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", ".."])
def test_a_name_from_elsewhere_cannot_lead_out_of_shared_memory(name: str) -> None:
    with pytest.raises(UnsafePathError, match="the run"):
        arena_path(name, "node")
    with pytest.raises(UnsafePathError, match="the node"):
        arena_path("run", name)


def test_a_second_holder_keeps_the_directory(tmp_path: Path) -> None:
    first, second = hold(tmp_path / "holdfast-a-n"), hold(tmp_path / "holdfast-a-n")
    os.close(first)
    assert sweep(tmp_path) == []
    os.close(second)
    assert sweep(tmp_path, exactly="holdfast-a-n") == [tmp_path / "holdfast-a-n"]


def test_the_last_to_leave_removes_the_directory(tmp_path: Path) -> None:
    directory = tmp_path / "holdfast-r-n"
    arena, other = Arena.open(directory, run="r"), hold(directory)
    assert not arena.leave()
    assert is_held(directory, other)
    successor = Arena.open(directory, run="r")
    os.close(other)
    assert successor.leave()
    assert not directory.exists()


def test_a_leaver_waits_for_those_who_are_about_to_let_go(tmp_path: Path) -> None:
    directory = tmp_path / "holdfast-r-n"
    arena, other = Arena.open(directory, run="r"), hold(directory)
    dying = threading.Timer(0.1, os.close, (other,))
    dying.start()
    assert arena.leave(patience_s=10)
    dying.join()


def test_a_second_owner_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Arena.open(tmp_path / "holdfast-r-n", run="r")
    monkeypatch.setattr("holdfast.ckpt.memory.arena._OWNER_WAIT_S", 0.05)
    with pytest.raises(FencedError, match="another sidecar of this node is running"):
        Arena.open(tmp_path / "holdfast-r-n", run="r")
    first.release()
    Arena.open(tmp_path / "holdfast-r-n", run="r").remove()


def test_memory_taken_away_is_out_of_reach_at_once_and_then_gone(tmp_path: Path) -> None:
    directory = tmp_path / "holdfast-r-n"
    arena = Arena.open(directory, run="r")
    arena.create(100)
    fd = hold(directory)
    with take_away(directory):
        assert not is_held(directory, fd)
        assert not directory.exists()
    assert list(tmp_path.iterdir()) == []
    with take_away(directory):
        assert list(tmp_path.iterdir()) == []
    fresh = hold(directory)
    arena.remove()
    assert is_held(directory, fresh), "what came after is not the old owner's to remove"
    for left in (fd, fresh):
        os.close(left)


def test_a_sweep_that_was_overtaken_leaves_the_new_directory_alone(tmp_path: Path) -> None:
    directory = tmp_path / "holdfast-r-n"
    old = hold(directory)
    with take_away(directory):
        new = hold(directory)
        os.close(old)
        assert sweep(tmp_path) == [tmp_path / "holdfast-r-n.lost"]
    assert is_held(directory, new)
    os.close(new)


def test_what_is_free_is_known_also_where_the_directory_was_taken_away(tmp_path: Path) -> None:
    arena = Arena.open(tmp_path / "arena", run="run")
    (tmp_path / "arena").rename(tmp_path / "gone")
    assert arena.free_bytes() > 0
    arena.release()
