"""The logbook in a store: one record at each number, and none that does not follow."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles import seas

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.errors import SeaError
from holdfast.elastic.islands.logbook import SeaLogbook
from holdfast.elastic.islands.mailbox import digest_of
from holdfast.elastic.sea.records import Entered, Left
from holdfast.elastic.sea.settings import Islands
from holdfast.elastic.sea.view import View

ISLANDS = Islands(name="a", every=4, portions=2, overlap=1)


def _opened(folder: Path, island: str = "a", *, apart: int = 64) -> SeaLogbook:
    found = SeaLogbook(LocalStore(folder), island=island, apart=apart)
    found.poll()
    return found


def _founded(folder: Path, *, apart: int = 64) -> SeaLogbook:
    logbook, founded = _opened(folder, apart=apart), seas.founded(ISLANDS).founded
    assert founded is not None
    assert logbook.append(founded)
    for number, name in enumerate(("a", "b"), start=1):
        record = Entered(number=number, island=name, tide=0, weight=10, lineage=number)
        assert logbook.append(record)
    return logbook


def test_every_reader_has_the_same_view(tmp_path: Path) -> None:
    logbook = _founded(tmp_path)
    merge = seas.merged(logbook.view, *(seas.work(logbook.view, name) for name in "ab"))
    assert logbook.append(merge)
    for island in ("a", "b"):
        found = _opened(tmp_path, island)
        assert found.view == logbook.view
        assert found.merged == {0: merge}
        lineage, part = found.mine[0]
        assert (lineage, part.island) == (found.view.members[island].lineage, island)


def test_of_two_records_at_one_number_the_first_stays(tmp_path: Path) -> None:
    logbook, other = _founded(tmp_path), _opened(tmp_path, "b")
    assert logbook.append(Left(number=3, island="b", why="silent"))
    assert not other.append(Left(number=3, island="a", why="silent"))
    assert other.view == logbook.view
    assert (other.left, logbook.left) == ("silent", None)


def test_a_record_that_does_not_follow_is_never_written(tmp_path: Path) -> None:
    logbook = _founded(tmp_path)
    with pytest.raises(SeaError, match="takes no part"):
        logbook.append(Left(number=3, island="c", why="done"))
    assert not (tmp_path / "logbook" / "00000003.json").exists()


def test_a_damaged_record_is_refused_with_its_file(tmp_path: Path) -> None:
    _founded(tmp_path)
    (tmp_path / "logbook" / "00000003.json").write_bytes(b'{"kind": "sunk"}')
    with pytest.raises(CorruptError, match=r"logbook/00000003\.json"):
        _opened(tmp_path)


class Counting(LocalStore):
    """A store that counts the reads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: list[str] = []

    def read(self, name: str, **limits: int) -> bytes:
        self.reads.append(name)
        return super().read(name, **limits)


def _merge_some(logbook: SeaLogbook, count: int) -> list[View]:
    """Merge so many tides, an island leaving and entering in between; return the views."""
    found = []
    for tide in range(count):
        view = logbook.view
        if tide == count // 2:
            assert logbook.append(Left(number=view.length, island="b", why="silent"))
            back = Entered(number=view.length + 1, island="b", tide=view.tide, weight=7, lineage=2)
            assert logbook.append(back)
        works = [seas.work(logbook.view, name) for name in logbook.view.members]
        assert logbook.append(seas.merged(logbook.view, *sorted(works, key=lambda w: w.island)))
        found.append(logbook.view)
    return found


def test_a_reader_goes_on_from_a_place_and_reads_only_what_is_new(tmp_path: Path) -> None:
    views = _merge_some(logbook := _founded(tmp_path), 8)
    for tide, view in enumerate(views, start=1):
        store = Counting(tmp_path)
        reader = SeaLogbook(store, island="a")
        reader.resume(logbook.place(tide))
        assert reader.view == view
        assert len(store.reads) == 2
        reader.poll()
        assert reader.view == logbook.view
        assert len(store.reads) == 2 + (logbook.view.length - view.length) + 1
        assert sorted(reader.merged) == sorted(reader.mine) == list(range(tide, 8))
        assert reader.place(8) == logbook.place(8)


def test_a_place_in_another_logbook_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    _merge_some(logbook := _founded(tmp_path / "one"), 2)
    _founded(tmp_path / "two")
    for folder in ("two", "none"):
        with pytest.raises(SeaError, match=r"not the logbook that the island's state is from"):
            SeaLogbook(LocalStore(tmp_path / folder), island="a").resume(logbook.place(2))
    with pytest.raises(SeaError, match="begin with the checkpoint of another step"):
        SeaLogbook(LocalStore(tmp_path / "one"), island="a").resume("{}")


def test_merges_that_are_adopted_are_released(tmp_path: Path) -> None:
    _merge_some(logbook := _founded(tmp_path), 4)
    logbook.forget_before(3)
    assert sorted(logbook.merged) == sorted(logbook.mine) == [3]
    assert (logbook.place(2), bool(logbook.place(3))) == ("", True)


def _newcomer(folder: Path) -> tuple[SeaLogbook, list[str]]:
    """Return what an island without a state knows, and the records that it read for it."""
    store = Counting(folder)
    found = SeaLogbook(store, island="c")
    found.begin_late()
    found.poll()
    return found, [name for name in store.reads if name.startswith("logbook/")]


def test_a_newcomer_reads_no_more_of_a_long_logbook_than_of_a_short_one(tmp_path: Path) -> None:
    logbook = _founded(tmp_path, apart=4)
    for _ in range(10):
        _merge_some(logbook, 3)
        found, read = _newcomer(tmp_path)
        assert found.view == logbook.view
        assert found.place(logbook.view.tide) == logbook.place(logbook.view.tide)
        assert len(read) <= 2 + 4 + 1, "the first, that of the place, the new ones, and none"
    assert logbook.view.length > 40
    assert len(list((tmp_path / "places").iterdir())) == 2


def test_a_place_that_is_damaged_or_of_another_version_is_passed_over(tmp_path: Path) -> None:
    _merge_some(logbook := _founded(tmp_path, apart=4), 5)
    old, new = sorted((tmp_path / "places").iterdir())
    new.write_bytes(new.read_bytes().replace(b"10", b"11", 1))
    assert _newcomer(tmp_path)[0].view == logbook.view
    data = b"{}"
    old.unlink()
    (tmp_path / "places" / f"{old.name[:8]}-{digest_of(data)}.json").write_bytes(data)
    found, read = _newcomer(tmp_path)
    assert found.view == logbook.view
    assert len(read) == logbook.view.length + 1


def test_a_record_from_before_the_place_is_read_if_it_is_needed(tmp_path: Path) -> None:
    _merge_some(logbook := _founded(tmp_path, apart=4), 6)
    found, _ = _newcomer(tmp_path)
    assert 0 not in found.merged
    found.reread()
    assert (found.view, found.merged) == (logbook.view, logbook.merged)
