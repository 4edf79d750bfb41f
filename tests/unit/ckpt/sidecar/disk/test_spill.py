"""Snapshots on a node's disk: the newest stay, deaths leave old or new, damage is found."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.blocks import make_world, random_payload

from holdfast.ckpt.errors import CorruptError, StoreError
from holdfast.ckpt.memory.arena import Arena, SlotFile
from holdfast.ckpt.memory.block import block_bytes
from holdfast.ckpt.memory.records import BlockEntry, ParityEntry, SnapshotWorld, ancestor
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.parity.row_file import RowFile
from holdfast.ckpt.sidecar.disk.directory import KEEP, SpillDirectory, SpilledHoldings
from holdfast.ckpt.testing.shards import make_index

RANKS, NBYTES = 2, 3001
Blocks = dict[int, tuple[SlotFile, BlockEntry]]


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.open(tmp_path / "arena", run="test")


def world_of(generation: int = 1, run: str = "test") -> SnapshotWorld:
    return make_world({"a": "x"}, rank_nodes=("a",) * RANKS, generation=generation, run=run)


def blocks_of(arena: Arena, step: int, *, nbytes: int = NBYTES) -> Blocks:
    made: Blocks = {}
    for rank in range(RANKS):
        payload = random_payload(nbytes, seed=(step, rank))
        index = make_index(
            payload, run="test", generation=1, step=step, rank=rank, world_size=RANKS
        )
        slot = arena.create(nbytes + 4096)
        slot.block(nbytes)[:] = payload
        made[rank] = (slot, slot.finish(index))
    return made


def held_of(arena: Arena, step: int, *, nbytes: int = NBYTES) -> SpilledHoldings:
    blocks = blocks_of(arena, step, nbytes=nbytes)
    row = random_payload(nbytes, seed=(step, 100))
    rows = [
        ParityEntry(generation=1, step=step, stripe=0, row=0, nbytes=nbytes, crc32c=crc32c(row)),
        ParityEntry(generation=1, step=step, stripe=1, row=0, nbytes=0, crc32c=0),
    ]
    return SpilledHoldings(
        world=world_of(),
        step=step,
        blocks=blocks,
        rows=[(rows[0], memoryview(row)), (rows[1], memoryview(b""))],
        sealed=[entry for _, entry in blocks.values()],
    )


def spill(directory: Path, arena: Arena, step: int, *, nbytes: int = NBYTES) -> None:
    holdings = held_of(arena, step, nbytes=nbytes)
    SpillDirectory(directory).write(holdings, pace=lambda nbytes: None)


def steps(directory: Path) -> list[int]:
    """Return the steps whose every block and row is there and intact, newest first."""
    spilled = SpillDirectory(directory)
    found = []
    for snapshot in spilled.snapshots():
        for entry in snapshot.blocks:
            slot = spilled.open(snapshot, entry)
            wanted = random_payload(entry.payload_bytes, seed=(snapshot.step, entry.rank))
            assert bytes(slot.block(entry.payload_bytes)) == wanted
            slot.close()
        assert len(snapshot.blocks) == RANKS
        row, empty = snapshot.parities
        file = spilled.open_row(snapshot, row)
        assert bytes(file.row(row.nbytes)) == random_payload(row.nbytes, seed=(snapshot.step, 100))
        assert file.borrowed
        assert not empty.nbytes
        file.close()
        found.append(snapshot.step)
    return found


def test_the_newest_stay_and_old_files_are_written_over(tmp_path: Path, arena: Arena) -> None:
    directory = tmp_path / "disk"
    assert steps(directory) == []
    inodes = []
    for step, nbytes in ((10, NBYTES), (20, 5 * NBYTES), (30, NBYTES), (40, 2 * NBYTES)):
        spill(directory, arena, step, nbytes=nbytes)
        inodes.append({path.stat().st_ino for path in directory.glob("*-*")})
        assert steps(directory)[0] == step
        assert len(list(directory.glob("*.slot"))) <= RANKS * KEEP
        assert len(list(directory.glob("*.row"))) <= KEEP
    assert steps(directory) == [40, 30]
    assert inodes[1] == inodes[2] == inodes[3]


def test_blocks_are_offered_under_a_generation_older_than_any(tmp_path: Path, arena: Arena) -> None:
    spill(tmp_path / "disk", arena, 10)
    (snapshot,) = SpillDirectory(tmp_path / "disk").snapshots()
    assert (snapshot.run, snapshot.generation) == ("test", 1)
    assert snapshot.world.generation == ancestor("test", 1) < 0
    entries = (*snapshot.blocks, *snapshot.parities, *snapshot.sealed)
    assert {entry.generation for entry in entries} == {ancestor("test", 1)}
    assert len({ancestor(run, n) for run in "abc" for n in range(100)}) == 300


class Died(BaseException):
    """The process was killed."""


@pytest.mark.parametrize("before", [1, 2, 3])
def test_after_a_death_between_any_two_changes_the_newest_is_still_there(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    def counted(change: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            if left[0] == 0:
                raise Died
            left[0] -= 1
            return change(*arguments, **options)

        return wrapper

    for changes in itertools.count():
        directory = tmp_path / f"disk{changes}"
        for step in range(before):
            spill(directory, arena, 10 * (step + 1))
        left, died = [changes], False
        holdings = held_of(arena, 90)
        with monkeypatch.context() as patch:
            for place, name in (
                (os, "write"),
                (os, "ftruncate"),
                (os, "fsync"),
                (Path, "rename"),
                (Path, "unlink"),
                (SlotFile, "write_header"),
                (RowFile, "label"),
                (RowFile, "mark_protected"),
            ):
                patch.setattr(place, name, counted(getattr(place, name), left))
            try:
                SpillDirectory(directory).write(holdings, pace=lambda nbytes: None)
            except Died:
                died = True
        assert steps(directory)[0] in (10 * before, 90)
        spill(directory, arena, 100)
        assert steps(directory)[0] == 100
        assert len(list(directory.iterdir())) <= (RANKS + 2) * KEEP
        if not died:
            break
    assert changes > 10


def test_a_flipped_byte_is_found(tmp_path: Path, arena: Arena) -> None:
    spill(tmp_path / "disk", arena, 10)
    path = sorted((tmp_path / "disk").glob("*.slot"))[0]
    intact = path.read_bytes()
    spilled = SpillDirectory(tmp_path / "disk")
    (snapshot,) = spilled.snapshots()
    entry = snapshot.blocks[0]
    for at in (2050, 4096, 4096 + NBYTES - 1, 4096 + block_bytes(entry) - 1):
        path.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
        with pytest.raises(CorruptError, match="use another copy"):
            spilled.open(snapshot, entry)
    path.write_bytes(intact[:4096])
    with pytest.raises(CorruptError):
        spilled.open(snapshot, entry)
    path.unlink()
    with pytest.raises(CorruptError):
        spilled.open(snapshot, entry)


def test_a_damaged_row_is_found(tmp_path: Path, arena: Arena) -> None:
    spill(tmp_path, arena, 10)
    (path,) = tmp_path.glob("*.row")
    intact = path.read_bytes()
    spilled = SpillDirectory(tmp_path)
    (snapshot,) = spilled.snapshots()
    for at in (0, 60, 4096, 4096 + NBYTES - 1):
        path.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
        with pytest.raises(CorruptError, match="goes on without it"):
            spilled.open_row(snapshot, snapshot.parities[0])
    path.unlink()
    with pytest.raises(CorruptError, match="goes on without it"):
        spilled.open_row(snapshot, snapshot.parities[0])


def test_a_list_that_cannot_be_read_offers_nothing(tmp_path: Path, arena: Arena) -> None:
    spill(tmp_path, arena, 10)
    next(tmp_path.glob("*.json")).write_text("{")
    assert steps(tmp_path) == []


def test_a_list_on_a_failing_disk_hides_only_its_own_snapshot_and_is_not_given_up(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill(tmp_path, arena, 10)
    spill(tmp_path, arena, 20)
    newest = max(tmp_path.glob("*.json"))
    read_bytes = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path == newest:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing)
        assert steps(tmp_path) == [10]
        with pytest.raises(StoreError, match="step 30 cannot be spilled: Input/output error"):
            spill(tmp_path, arena, 30)
    assert steps(tmp_path) == [20, 10]


def test_a_disk_that_refuses_is_said(tmp_path: Path, arena: Arena) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"step 10 cannot be spilled: .*choose another place"):
        spill(tmp_path / "file" / "disk", arena, 10)
