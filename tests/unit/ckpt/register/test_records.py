"""The blocks that a reader needs are found by name and by box."""

from __future__ import annotations

import pytest

from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.register.records import (
    Corner,
    ListedBlock,
    Want,
    around,
    meet,
    needed,
    numbers,
    region_of,
)


def block(first: str, last: str, low: Corner = (), high: Corner = ()) -> ListedBlock:
    return ListedBlock(
        at=0, stored=1, crc32c=0, nbytes=1, first=first, last=last, low=low, high=high
    )


BLOCKS = [
    block("a", "c"),
    block("d", "d", (0, 0), (4, 8)),
    block("d", "d", (4, 0), (8, 8)),
    block("e", "k"),
]


@pytest.mark.parametrize(
    ("want", "found"),
    [
        (None, [0, 1, 2, 3]),
        ({}, []),
        ({"b": None}, [0]),
        ({"d": None}, [1, 2]),
        ({"d": [((3, 1), (4, 2))]}, [1]),
        ({"d": [((3, 1), (5, 2))]}, [1, 2]),
        ({"d": [((0, 0), (0, 8))]}, []),
        ({"d": [((0, 0), (1, 1)), ((7, 7), (8, 8))]}, [1, 2]),
        ({"c": [], "f": [], "z": None}, [0, 3]),
        ({"0": None, "da": None}, []),
    ],
)
def test_blocks_that_may_hold_what_is_wanted(want: Want | None, found: list[int]) -> None:
    assert [*needed(BLOCKS, want)] == [BLOCKS[number] for number in found]


def test_a_page_is_described_by_what_its_blocks_hold() -> None:
    assert around(BLOCKS) == ("a", "k", (), ())
    assert around(BLOCKS[1:3]) == ("d", "d", (0, 0), (8, 8))


def test_regions_that_meet_share_an_element() -> None:
    assert meet((), (), ((), ()))
    assert meet((0, 0), (2, 2), region_of(Box(offset=(1, 1), shape=(5, 5))))
    assert not meet((0, 0), (2, 2), ((2, 0), (3, 2)))


def test_neighbours_are_one_region() -> None:
    assert numbers([7, 1, 3, 2, 3]) == [((1,), (4,)), ((7,), (8,))]
    assert numbers([]) == []
