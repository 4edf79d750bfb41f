"""Slices are parsed and refused as numpy users expect, and divided at the borders of chunks."""

from __future__ import annotations

import pytest

from holdfast.ckpt.geometry.slicing import everything, parse, select, split_name, tiles


@pytest.mark.parametrize(
    ("text", "name", "inner"),
    [("a.b", "a.b", None), ("a.b[0:2, ::3]", "a.b", "0:2, ::3"), ("a[0][1]", "a[0]", "1")],
)
def test_a_name_and_its_slice_are_told_apart(text: str, name: str, inner: str | None) -> None:
    assert split_name(text) == (name, inner)


def test_a_slice_is_parsed() -> None:
    assert parse("0:2, ::3,-1 , ..., :") == (
        slice(0, 2),
        slice(None, None, 3),
        -1,
        ...,
        slice(None),
    )


@pytest.mark.parametrize("text", ["", " ", "a", "1.5", "1:2:3:4", "0,,1", "None"])
def test_what_is_no_slice_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [("1, 2, 3", "3 indices"), ("..., ...", "2 indices"), ("9", "out of range"), ("::-1", "step")],
)
def test_what_cannot_be_selected_is_refused(text: str, said: str) -> None:
    with pytest.raises(IndexError, match=said):
        select(parse(text), (4, 5))


def test_cuts_lie_at_the_borders_of_cells() -> None:
    for tile in tiles(everything((100, 10)), itemsize=4, most_bytes=2000, cell=(16, 10)):
        assert tile.box.offset[0] % 16 == 0
