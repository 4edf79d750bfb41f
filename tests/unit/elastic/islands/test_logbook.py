"""The logbook in a store: one record at each number, and none that does not follow."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles import seas

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.errors import SeaError
from holdfast.elastic.islands.logbook import SeaLogbook
from holdfast.elastic.sea.records import Entered, Left
from holdfast.elastic.sea.settings import Islands

ISLANDS = Islands(name="a", every=4, portions=2, overlap=1)


def _opened(folder: Path, island: str = "a") -> SeaLogbook:
    found = SeaLogbook(LocalStore(folder), island=island)
    found.poll()
    return found


def _founded(folder: Path) -> SeaLogbook:
    logbook, founded = _opened(folder), seas.founded(ISLANDS).founded
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
