"""Files of writers that pull, filled from pieces that are pushed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast.ckpt.convert.filling import Filler, Piece
from holdfast.ckpt.errors import StateError, StoreError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.store.handover import Handover

BOX = Box(offset=(0,), shape=(1,))


class Kept:
    """A file that keeps its bytes, or fails."""

    def __init__(self, *names: str, fails: bool = False) -> None:
        self.names, self.fails = names, fails
        self.data: list[bytes] | None = None
        self.unwound = False

    def pieces(self) -> Iterator[Piece]:
        for name in self.names:
            yield name, BOX

    def fill(self, parts: Iterator[memoryview]) -> None:
        if self.fails:
            raise StoreError("the disk is full")
        got = []
        try:
            for part in parts:
                got.append(bytes(part))
        finally:
            self.unwound = True
        self.data = got


def push(filler: Filler, name: str) -> None:
    filler.push(name, BOX, memoryview(name.encode()))


def test_files_are_filled_one_after_the_other_empty_ones_too() -> None:
    files = [Kept("a", "b"), Kept(), Kept("c"), Kept()]
    filler = Filler(files)
    for name, _ in filler.pieces():
        push(filler, name)
    filler.finish()
    assert [file.data for file in files] == [[b"a", b"b"], [], [b"c"], []]


def test_the_pieces_may_be_asked_for_long_before_they_are_pushed() -> None:
    files = [Kept("a"), Kept("b")]
    filler = Filler(files)
    assert [name for name, _ in filler.pieces()] == ["a", "b"]
    push(filler, "a")
    push(filler, "b")
    filler.finish()
    assert [file.data for file in files] == [[b"a"], [b"b"]]


def test_another_piece_than_the_next_is_refused() -> None:
    filler = Filler([Kept("a", "b")])
    list(filler.pieces())
    with pytest.raises(StateError, match="not the next piece"):
        push(filler, "b")
    filler.abandon()


def test_a_piece_that_never_came_is_noticed() -> None:
    file = Kept("a", "b")
    filler = Filler([file])
    list(filler.pieces())
    push(filler, "a")
    with pytest.raises(StateError, match="never pushed"):
        filler.finish()
    filler.abandon()
    assert file.data is None


def test_abandoning_unwinds_the_file_and_its_thread() -> None:
    before = threading.active_count()
    file = Kept("a", "b")
    filler = Filler([file])
    list(filler.pieces())
    push(filler, "a")
    filler.abandon()
    assert (file.unwound, file.data) == (True, None)
    assert threading.active_count() == before
    filler.abandon()


def test_what_the_file_raises_reaches_who_pushes() -> None:
    filler = Filler([Kept("a", "b", fails=True)])
    list(filler.pieces())
    with pytest.raises(StoreError, match="disk is full"):
        for name in ("a", "b"):
            push(filler, name)
    filler.abandon()


def test_what_the_file_raises_at_the_end_reaches_who_finishes() -> None:
    filler = Filler([Kept(fails=True)])
    list(filler.pieces())
    with pytest.raises(StoreError, match="disk is full"):
        filler.finish()


def test_more_than_the_file_takes_is_an_error() -> None:
    handover = Handover(next)
    with pytest.raises(StateError, match="room for"):
        for _ in range(4):
            handover.push(memoryview(b"x"))
