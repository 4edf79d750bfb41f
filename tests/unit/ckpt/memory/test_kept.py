"""Memory that is kept for a job that may come back stays without a holder, for a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.ckpt.memory import kept
from holdfast.ckpt.memory.arena import Arena, hold, sweep, take_away


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    directory = tmp_path / "holdfast-r-n"
    os.close(hold(directory))
    return directory


def test_kept_memory_stays_without_a_holder_until_its_time_is_over(arena: Path) -> None:
    kept.keep(arena, seconds=1000)
    assert sweep(arena.parent) == []
    assert sweep(arena.parent, exactly=arena.name) == []
    kept.keep(arena, seconds=0)
    assert not kept.is_kept(arena)
    assert sweep(arena.parent) == [arena]


def test_the_last_to_leave_kept_memory_leaves_it(arena: Path) -> None:
    kept.keep(arena, seconds=1000)
    assert not Arena.open(arena, run="r").leave()
    assert arena.exists()
    kept.give_up(arena)
    assert Arena.open(arena, run="r").leave()
    assert not arena.exists()


def test_memory_that_is_taken_away_is_not_kept(arena: Path) -> None:
    kept.keep(arena, seconds=1000)
    with take_away(arena):
        assert [kept.is_kept(each) for each in arena.parent.iterdir()] == [False]
    kept.give_up(arena)
    kept.keep(arena, seconds=1000)
    assert list(arena.parent.iterdir()) == []


@pytest.mark.parametrize("text", [b"", b"soon", b"1" * 5000])
def test_a_damaged_time_keeps_nothing(arena: Path, text: bytes) -> None:
    (arena / "kept").write_bytes(text)
    assert not kept.is_kept(arena)
    assert sweep(arena.parent) == [arena]


def test_nothing_is_written_into_what_is_not_ours(arena: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "kept").write_text("thesis")
    link = tmp_path / "holdfast-r-other"
    link.symlink_to(precious)
    kept.keep(link, seconds=1)
    kept.give_up(link)
    assert (precious / "kept").read_text() == "thesis"
    (arena / "kept").symlink_to(precious / "kept")
    kept.keep(arena, seconds=1)
    assert (precious / "kept").read_text() == "thesis"
