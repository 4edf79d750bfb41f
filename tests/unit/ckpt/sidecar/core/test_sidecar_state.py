"""The book of snapshots: commit, protection, retention, fencing; the tables of moves."""

from __future__ import annotations

import msgspec
import pytest
from doubles.blocks import make_world

from holdfast.ckpt.errors import CkptError, FencedError, MismatchError, NotFoundError
from holdfast.ckpt.memory.block import SlotState
from holdfast.ckpt.memory.records import BlockEntry, RestorePoint, SnapshotWorld
from holdfast.ckpt.sidecar.core.book import (
    PHASES,
    SLOTS,
    Book,
    Instruction,
    Release,
    SlotEvent,
    SnapshotPhase,
    move_slot,
)

NODES = {"a": "tcp://a", "b": "tcp://b"}
PAIR = make_world(NODES, parity=1, keep=1)


def entry(rank: int, step: int, generation: int = 1) -> BlockEntry:
    return BlockEntry(
        generation=generation,
        step=step,
        rank=rank,
        payload_bytes=10,
        index_bytes=10,
        index_crc32c=0,
    )


def in_world(world: SnapshotWorld = PAIR) -> Book:
    book = Book()
    book.adopt(world, None)
    return book


def protect(book: Book, step: int, generation: int = 1) -> list[Instruction]:
    done = []
    for rank in (0, 1):
        done += book.seal(entry(rank, step, generation))
    for stripe in (0, 1):
        done += book.seal_row((generation, step), (stripe, 0))
    return done


def names_and_steps(instructions: list[Instruction]) -> list[tuple[str, int]]:
    """Return the name of each instruction with its step."""
    return [
        (type(each).__name__, each.key[1] if isinstance(each, Release) else each.snapshot.step)
        for each in instructions
    ]


def point(step: int, world: SnapshotWorld = PAIR) -> RestorePoint:
    return RestorePoint(world=world, step=step, sources=())


def test_a_snapshot_commits_with_the_last_rank_and_is_protected_with_the_last_row() -> None:
    book = in_world()
    assert book.seal(entry(0, 1)) == []
    assert names_and_steps(book.seal(entry(1, 1))) == [("CommitSnapshot", 1)]
    assert book.seal_row((1, 1), (0, 0)) == []
    assert names_and_steps(book.seal_row((1, 1), (1, 0))) == [("Protect", 1)]
    assert book.newest(SnapshotPhase.PROTECTED) == 1


def test_rows_that_are_heard_of_before_the_seals_count_too() -> None:
    book = in_world()
    for stripe in (0, 1):
        book.seal_row((1, 1), (stripe, 0))
    book.seal(entry(0, 1))
    assert names_and_steps(book.seal(entry(1, 1))) == [("CommitSnapshot", 1), ("Protect", 1)]


def test_without_parity_committed_is_protected() -> None:
    book = in_world(make_world({"a": "tcp://a"}))
    assert names_and_steps(book.seal(entry(0, 1))) == [("CommitSnapshot", 1), ("Protect", 1)]


def test_the_keep_newest_protected_steps_stay() -> None:
    book = in_world()
    protect(book, 1)
    assert protect(book, 2)[-1] == Release(key=(1, 1))
    assert list(book.snapshots) == [(1, 2)]


def test_a_step_overtaken_by_a_later_one_is_still_protected() -> None:
    book = in_world()
    for rank in (0, 1):
        book.seal(entry(rank, 1))
    protect(book, 2)
    book.seal_row((1, 1), (0, 0))
    assert names_and_steps(book.seal_row((1, 1), (1, 0))) == [("Protect", 1), ("Release", 1)]


def test_a_late_message_about_a_released_step_changes_nothing() -> None:
    book = in_world()
    protect(book, 1)
    protect(book, 2)
    assert book.seal(entry(0, 1)) == []
    assert book.seal_row((1, 1), (0, 0)) == []
    assert list(book.snapshots) == [(1, 2)]


def test_after_an_inventory_nothing_of_the_generation_is_taken_in() -> None:
    book = in_world()
    protect(book, 1)
    for rank in (0, 1):
        book.seal(entry(rank, 2))
    book.seal_row((1, 2), (0, 0))
    book.close()
    for late in (
        lambda: book.seal(entry(0, 3)),
        lambda: book.seal_row((1, 2), (1, 0)),
        lambda: book.give_up((1, 3)),
    ):
        with pytest.raises(FencedError, match="inventory"):
            late()
    assert list(book.snapshots) == [(1, 1), (1, 2)]
    assert book.newest(SnapshotPhase.PROTECTED) == 1
    book.adopt(make_world(NODES, parity=1, keep=1, generation=2), point(1))
    assert not book.is_closed


def test_a_new_generation_fences_the_old_and_drops_the_rolled_back_future() -> None:
    book = in_world(make_world(NODES, parity=1, keep=2))
    for step in (1, 2, 3):
        protect(book, step)
    book.seal(entry(0, 4))
    after = make_world(NODES, parity=1, keep=2, generation=2)
    assert book.adopt(after, point(2)) == [Release(key=(1, 3)), Release(key=(1, 4))]
    assert list(book.snapshots) == [(1, 2)]
    with pytest.raises(FencedError, match="generation 1 is over"):
        book.seal(entry(0, 3))
    with pytest.raises(FencedError):
        book.adopt(PAIR, None)


def test_old_snapshots_stay_until_the_new_generation_has_its_own() -> None:
    book = in_world()
    protect(book, 7)
    book.adopt(make_world(NODES, parity=1, keep=1, generation=2), point(7))
    book.seal(entry(0, 7, 2))
    assert (1, 7) in book.snapshots
    assert protect(book, 7, 2)[-1] == Release(key=(1, 7))


def test_the_keep_rule_counts_a_step_once_across_generations() -> None:
    book = in_world(make_world(NODES, parity=1, keep=2))
    protect(book, 6)
    protect(book, 7)
    book.adopt(make_world(NODES, parity=1, keep=2, generation=2), point(7))
    protect(book, 7, 2)
    assert list(book.snapshots) == [(1, 6), (2, 7)]
    assert book.find(7, generation=None).key == (2, 7)


def test_what_a_generation_began_from_can_be_read_although_its_parity_never_came() -> None:
    """Rollouts bound to such a version waited for it for ever."""
    book = in_world(msgspec.structs.replace(PAIR, keep=3))
    protect(book, 1)
    for step in (2, 3):
        for rank in (0, 1):
            book.seal(entry(rank, step))
    with pytest.raises(NotFoundError, match=r"step 2 in memory; have \[1\]"):
        book.find(2, generation=None)
    book.adopt(msgspec.structs.replace(PAIR, generation=2, keep=3), point(3))
    assert [book.find(step, generation=None).key for step in (1, 2, 3)] == [(1, 1), (1, 2), (1, 3)]
    assert names_and_steps(protect(book, 4, generation=2)) == [
        ("CommitSnapshot", 4),
        ("Protect", 4),
        ("Release", 1),
    ]
    assert [book.find(step, generation=None).key for step in (2, 3)] == [(1, 2), (1, 3)]


def test_with_nothing_to_restore_nothing_old_is_kept() -> None:
    book = in_world()
    protect(book, 7)
    after = make_world(NODES, parity=1, keep=1, generation=2)
    assert book.adopt(after, None) == [Release(key=(1, 7))]


def test_adopting_twice_is_harmless_but_not_with_another_group() -> None:
    book = in_world()
    protect(book, 1)
    assert book.adopt(PAIR, None) == []
    assert (1, 1) in book.snapshots
    with pytest.raises(MismatchError, match="another group"):
        book.adopt(make_world(NODES, parity=0), None)
    with pytest.raises(MismatchError, match="serves run"):
        book.adopt(make_world(NODES, run="else", generation=2), None)


def test_a_caller_ahead_of_this_sidecar_is_told_to_try_again() -> None:
    with pytest.raises(NotFoundError, match="try again"):
        in_world().seal(entry(0, 1, generation=2))


def test_a_step_one_rank_gave_up_is_dropped_and_stays_dropped() -> None:
    book = in_world()
    book.seal(entry(0, 1))
    assert book.give_up((1, 1)) == [Release(key=(1, 1))]
    assert book.seal(entry(1, 1)) == []
    assert book.snapshots == {}


def test_sealing_twice_is_harmless_with_the_same_bytes_only() -> None:
    book = in_world()
    book.seal(entry(0, 1))
    book.seal(entry(0, 1))
    changed = BlockEntry(
        generation=1, step=1, rank=0, payload_bytes=11, index_bytes=10, index_crc32c=0
    )
    with pytest.raises(MismatchError, match="different contents"):
        book.seal(changed)


def test_a_missing_step_is_answered_with_those_there_are() -> None:
    book = in_world()
    protect(book, 3)
    with pytest.raises(NotFoundError, match=r"step 2 in memory; have \[3\]"):
        book.find(2, generation=None)


def test_slots_move_only_as_the_table_says() -> None:
    assert move_slot(SlotState.WRITING, SlotEvent.SEAL, slot=1) is SlotState.SEALED
    with pytest.raises(CkptError, match="slot 1 is EMPTY: it cannot seal"):
        move_slot(SlotState.EMPTY, SlotEvent.SEAL, slot=1)
    assert len(SLOTS) == 6
    assert len(PHASES) == 2
