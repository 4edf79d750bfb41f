"""A parity row's file: valid labels are trusted, torn or foreign ones are not."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from doubles.blocks import make_world
from rows import is_intact

from holdfast.ckpt.errors import CapacityError, CorruptError
from holdfast.ckpt.memory.arena import Arena, run_digest
from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.memory.records import ParityEntry
from holdfast.ckpt.native import pages
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.sums import sums_of
from holdfast.ckpt.parity.row_file import RowFile
from holdfast.ckpt.sidecar.parity.rows import Parities, ParityRow, RowSize

RUN = run_digest("test")


def entry(step: int = 1, nbytes: int = 1000, checksum: int = 0) -> ParityEntry:
    return ParityEntry(generation=1, step=step, stripe=2, row=0, nbytes=nbytes, crc32c=checksum)


def test_a_label_survives_and_says_whether_the_snapshot_was_protected(tmp_path: Path) -> None:
    file = RowFile.create(tmp_path / "1.row", 1000)
    assert file.read_label(run=RUN) is None
    file.row(1000)[:] = bytes(range(250)) * 4
    file.label(entry(), run=RUN)
    found = RowFile.open(file.path).read_label(run=RUN)
    assert found is not None and (found.entry, found.protected) == (entry(), False)
    file.mark_protected()
    found = RowFile.open(file.path).read_label(run=RUN)
    assert found is not None and (found.entry, found.protected) == (entry(), True)
    assert file.read_label(run=run_digest("another")) is None


def test_a_file_used_again_has_neither_label_nor_mark(tmp_path: Path) -> None:
    file = RowFile.create(tmp_path / "1.row", 1000)
    file.label(entry(), run=RUN)
    file.mark_protected()
    file.clear()
    assert file.read_label(run=RUN) is None
    file.label(entry(step=2), run=RUN)
    found = file.read_label(run=RUN)
    assert found is not None and (found.entry.step, found.protected) == (2, False)


@pytest.mark.parametrize("at", [0, 9, 30, 60, 100, 105, 110])
def test_a_torn_label_is_none(tmp_path: Path, at: int) -> None:
    file = RowFile.create(tmp_path / "1.row", 1000)
    file.label(entry(), run=RUN)
    with file.path.open("r+b") as raw:
        raw.seek(at)
        byte = raw.read(1)[0]
        raw.seek(at)
        raw.write(bytes([byte ^ 1]))
    assert file.read_label(run=RUN) is None


def test_a_file_too_short_for_a_row_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "1.row").write_bytes(b"x" * 10)
    with pytest.raises(CorruptError, match="too short"):
        RowFile.open(tmp_path / "1.row")


def test_no_room_is_said_with_the_remedy_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _nbytes: int, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pages, "allocate", full)
    with pytest.raises(CapacityError, match="keep fewer"):
        RowFile.create(tmp_path / "1.row", 1000)
    assert list(tmp_path.iterdir()) == []


# -- the table -----------------------------------------------------------------------------------


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena.open(tmp_path / "arena", run="test")


def sizes(*nbytes: int) -> list[RowSize]:
    return [RowSize(nbytes=each) for each in nbytes]


def seal(parities: Parities, step: int, *, fill: int = 7, nbytes: int = 1000) -> ParityRow:
    file = parities.take(RowSize(nbytes=nbytes))
    file.row(nbytes)[:] = bytes([fill]) * nbytes
    return parities.seal(file, entry(step, nbytes, crc32c(file.row(nbytes))))


def test_files_of_released_rows_are_used_again(arena: Arena) -> None:
    parities = Parities(arena)
    parities.expect(sizes(1000), keep=2)
    paths = set()
    for step in range(1, 20):
        row = seal(parities, step)
        assert row.file is not None and is_intact(row)
        paths.add(row.file.path)
        if step > 2:
            parities.drop((1, step - 2))
    assert len(paths) == 3
    assert parities.nbytes() == 3 * ((1 << 16) + HEADER_BYTES)


def test_surplus_files_and_those_of_another_size_are_removed(arena: Arena) -> None:
    parities = Parities(arena)
    parities.expect(sizes(1000), keep=1)
    for step in range(5):
        seal(parities, step)
    for step in range(5):
        parities.drop((1, step))
    assert len(list(arena.directory.glob("*.row"))) == 1
    parities.expect(sizes(1 << 20), keep=1)
    seal(parities, 6, nbytes=1 << 20)
    assert len(list(arena.directory.glob("*.row"))) == 1


def test_files_are_made_ahead_for_what_is_kept_and_one_more_of_each_length(arena: Arena) -> None:
    parities = Parities(arena)
    assert parities.missing() is None
    parities.expect(sizes(1000, 0, 900_000), keep=2)
    made = []
    while size := parities.missing():
        parities.make(size)
        made.append(size.nbytes)
    assert sorted(made) == [1000] * 3 + [900_000] * 3
    parities.expect(sizes(1000, 2_000_000), keep=2)  # the others first make room
    assert parities.missing() is None
    row = seal(parities, 1, nbytes=2_000_000)
    assert is_intact(row)
    assert len(list(arena.directory.glob("*.row"))) == 4
    assert parities.missing() == RowSize(nbytes=2_000_000)


def test_a_row_that_is_being_read_is_not_written_to(arena: Arena) -> None:
    parities = Parities(arena)
    parities.expect(sizes(1000), keep=1)
    row = seal(parities, 1)
    with row.lock:
        buffer = row.buffer
        parities.drop((1, 1))
        seal(parities, 2, fill=9)
        assert buffer is not None and bytes(buffer) == bytes([7]) * 1000


def test_a_successor_takes_sealed_rows_over_and_removes_the_rest(arena: Arena) -> None:
    earlier = Parities(arena)
    seal(earlier, 1)
    seal(earlier, 2)
    earlier.mark_protected((1, 1))
    earlier.take(RowSize(nbytes=1000))  # being built
    (arena.directory / "short.row").write_bytes(b"")
    parities = Parities(arena)
    worlds = {1: make_world({"a": "tcp://a"})}
    assert [(each.step, known) for each, known in parities.readopt(worlds)] == [
        (1, True),
        (2, False),
    ]
    assert all(is_intact(row) for row in parities.sealed())
    assert len(list(arena.directory.glob("*.row"))) == 2
    assert Parities(arena).readopt({2: worlds[1]}) == []
    assert list(arena.directory.glob("*.row")) == []


# -- fixed parts ---------------------------------------------------------------------------------

PAGES = 3 * 4096


def with_fixed(parities: Parities, *, own_bytes: int = 1000) -> RowSize:
    name = parities.fixed_name("contents")
    return RowSize(nbytes=PAGES + own_bytes, fixed=name, fixed_bytes=PAGES)


def seal_with_fixed(parities: Parities, step: int) -> ParityRow:
    """Build a row as its builder does: the fixed part only where it is not complete."""
    size = with_fixed(parities)
    known = parities.fixed_sums(size.fixed)
    file = parities.take(size)
    start = 0 if known is None else PAGES
    row = file.row(size.nbytes)
    row[start:] = (b"fixd" * PAGES)[: PAGES - start] + bytes([step]) * 1000
    if known is None:
        assert parities.use_fixed(size.fixed)
        parities.end_use(size.fixed, sums=sums_of(row[:PAGES]))
    return parities.seal(file, entry(step, size.nbytes, crc32c(row)))


def test_rows_share_the_pages_of_their_fixed_part(arena: Arena) -> None:
    parities = Parities(arena)
    parities.expect([with_fixed(parities)], keep=1)
    assert parities.missing() is None, "the first row fills the part"
    rows = [seal_with_fixed(parities, step) for step in (1, 2, 3)]
    assert all(is_intact(row) for row in rows)
    (part,) = arena.directory.glob("*.row-fixed")
    assert part.stat().st_size == PAGES
    own = 3 * ((1 << 16) + HEADER_BYTES)
    assert parities.nbytes() == own + PAGES
    parities.drop((1, 1))
    row = seal_with_fixed(parities, 4)
    assert is_intact(row) and is_intact(rows[2])
    assert len(list(arena.directory.glob("*.row"))) == 3


def test_a_fixed_part_goes_with_the_last_row_that_names_it(arena: Arena) -> None:
    parities = Parities(arena)
    parities.expect([with_fixed(parities)], keep=1)
    seal_with_fixed(parities, 1)
    parities.expect(sizes(1000), keep=1)
    assert len(list(arena.directory.glob("*-fixed"))) == 1
    parities.drop((1, 1))
    parities.expect(sizes(1000), keep=1)
    assert list(arena.directory.glob("*-fixed")) == []


def test_one_row_at_a_time_fills_a_fixed_part_and_each_attempt_has_its_own(arena: Arena) -> None:
    parities = Parities(arena)
    name = parities.fixed_name("contents")
    assert parities.use_fixed(name)
    assert not parities.use_fixed(name), "another row is filling it"
    parities.end_use(name)
    assert parities.fixed_name("contents") != name, "a thread of that row may still write to it"


def test_a_fixed_part_stays_while_a_row_in_progress_needs_it(arena: Arena) -> None:
    parities = Parities(arena)
    parities.expect([with_fixed(parities)], keep=1)
    name = seal_with_fixed(parities, 1).fixed_name
    assert parities.use_fixed(name)
    parities.drop((1, 1))
    parities.expect(sizes(1000), keep=1)
    seal(parities, 2)  # the free file of another length goes
    assert parities.fixed_sums(name) is not None
    assert len(list(arena.directory.glob("*-fixed"))) == 1
    parities.end_use(name)
    parities.expect(sizes(1000), keep=1)
    assert list(arena.directory.glob("*-fixed")) == []


def test_a_damaged_fixed_part_is_replaced_and_the_rows_before_keep_theirs(arena: Arena) -> None:
    parities = Parities(arena)
    parities.expect([with_fixed(parities)], keep=1)
    before = seal_with_fixed(parities, 1)
    parities.distrust_fixed(before.fixed_name)
    parities.expect([with_fixed(parities)], keep=1)
    after = seal_with_fixed(parities, 2)
    assert after.fixed_name != before.fixed_name
    assert is_intact(before) and is_intact(after)


def test_a_successor_takes_over_fixed_parts_of_intact_rows(arena: Arena) -> None:
    earlier = Parities(arena)
    seal_with_fixed(earlier, 1)
    (arena.directory / "other.row-fixed").write_bytes(bytes(4096))
    (arena.directory / "unfinished.row-fixed.part").write_bytes(bytes(4096))
    parities = Parities(arena)
    parities.readopt({1: make_world({"a": "tcp://a"})})
    assert len(list(arena.directory.glob("*-fixed*"))) == 1
    name = with_fixed(parities).fixed
    assert parities.fixed_sums(name) is not None
    (row,) = parities.sealed()
    assert is_intact(row)

    assert row.buffer is not None
    row.file = None
    with next(arena.directory.glob("*-fixed")).open("r+b") as part:
        part.write(b"X")
    damaged = Parities(arena)
    damaged.readopt({1: make_world({"a": "tcp://a"})})
    assert damaged.fixed_sums(name) is None
