"""The result of a run survives the round trip through its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.tools.chaos.judging.checker import HistoryVerdict, Violation
from holdfast.tools.chaos.judging.result import RESULT, Result, ResultError, Struck, load, save

FOUND = Result(
    name="kill-a-rank",
    world="real",
    seed=7,
    only=(0, 3),
    held=False,
    seconds=12.5,
    verdict=HistoryVerdict(
        attempts=2,
        steps=20,
        executed=22,
        undone=2,
        undone_most=2,
        samples=80,
        checked=("samples once",),
        violations=(Violation(check="samples once", message="1 sample was trained on twice"),),
    ),
    struck=(Struck(number=0, kind="kill", victim="trainer/1", t=3.5),),
    problems=("left behind: process 7",),
    replay="holdfast chaos run kill-a-rank --seed 7 --only 0,3",
)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    save(tmp_path, FOUND)
    assert load(tmp_path) == FOUND
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


def test_a_folder_without_a_result_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="give the folder of a finished run"):
        load(tmp_path)
    (tmp_path / RESULT).write_text("{}")
    with pytest.raises(ResultError, match="not the result of a run"):
        load(tmp_path)
