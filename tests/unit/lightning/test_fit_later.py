"""Points and files wait for their step; a mark says how much of a log belongs to whole steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.adapters.lightning.fitting.later import Later, SavedFiles
from holdfast.adapters.lightning.fitting.marks import LogMark


def test_what_waits_is_done_step_by_step_and_in_order() -> None:
    steps = iter([3, 3, 4, 4, 5])
    later = Later(lambda: next(steps), leads=True)
    for kind, value in (("a", 1), ("b", 2), ("a", 3), ("a", 4), ("b", 5)):
        later.add(kind, value)
    done: list[Any] = []
    acts = {
        each: lambda step, values, each=each: done.append((each, step, values)) for each in "ab"
    }
    later.act(4, acts)
    assert done == [("a", 3, [1]), ("b", 3, [2]), ("a", 4, [3, 4])]
    assert later.waiting == [[5, "b", 5]]


def test_a_rank_that_does_not_lead_keeps_nothing() -> None:
    later = Later(lambda: 0, leads=False)
    later.add("a", 1)
    assert later.waiting == []


def files(later: Later) -> SavedFiles:
    return SavedFiles(later, leads=True)


def test_a_file_gets_its_name_once_its_step_is_protected(tmp_path: Path) -> None:
    later = Later(lambda: 7, leads=True)
    saved, place = files(later), tmp_path / "saves" / "a.ckpt"
    saved.save(str(place), lambda beside: beside.write_text("new"), step=8)
    assert saved.exists(str(place))
    assert not place.exists()
    later.act(7, {"file": saved.act})
    assert place.read_text() == "new"
    saved.remove(str(place))
    assert not saved.exists(str(place))
    assert place.exists()
    waiting = [list(each) for each in later.waiting]
    later.act(7, {"file": saved.act})
    assert not place.exists()
    later.waiting = waiting
    later.act(7, {"file": saved.act})  # again, after a restore


def test_a_step_that_is_lost_leaves_no_file_behind(tmp_path: Path) -> None:
    lost = files(Later(lambda: 1, leads=True))
    lost.save(str(tmp_path / "a.ckpt"), lambda beside: beside.write_text("1"), step=1)
    later = Later(lambda: 2, leads=True)
    again = files(later)
    again.save(str(tmp_path / "b.ckpt"), lambda beside: beside.write_text("2"), step=2)
    later.act(2, {"file": again.act})
    again.finish()
    assert [each.name for each in tmp_path.iterdir()] == ["b.ckpt"]


def test_files_of_before_the_run_exist(tmp_path: Path) -> None:
    (tmp_path / "old.ckpt").touch()
    (tmp_path / "other.txt").touch()
    saved = files(Later(lambda: 0, leads=True))
    saved.begin(tmp_path, ".ckpt")
    saved.begin(tmp_path / "absent", ".ckpt")
    assert saved.known == {str(tmp_path / "old.ckpt")}


def test_a_mark_is_that_of_its_run(tmp_path: Path) -> None:
    assert LogMark.read(tmp_path, "a") is None
    mark = LogMark(run="a", step=3, rows=5, files={"events": 9})
    mark.write(tmp_path)
    assert LogMark.read(tmp_path, "a") == mark
    assert LogMark.read(tmp_path, "b") is None
    assert [each.name for each in tmp_path.iterdir()] == [".holdfast.json"]
