"""The grids that the boxes of savers form, and the division of their cells."""

from __future__ import annotations

import pytest
from doubles.checkpoints import split_dim

from holdfast.ckpt.geometry.grid import (
    cells,
    common_grid,
    fault_of_cover,
    is_cell,
    split_grid,
    whole,
)
from holdfast.ckpt.geometry.layout import Box


def box(offset: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    return Box(offset=offset, shape=shape)


@pytest.mark.parametrize(("size", "parts"), [(8, 2), (10, 3), (5, 4), (7, 8), (1, 3)])
def test_what_fsdp_splits_is_a_grid_with_a_ragged_edge(size: int, parts: int) -> None:
    boxes = split_dim((size, 6), parts=parts)
    assert common_grid((size, 6), boxes) == (-(-size // parts), 6)
    assert fault_of_cover((size, 6), boxes) is None


def test_flat_ranges_are_no_grid() -> None:
    boxes = [box((0,), (2,)), box((2,), (1,)), box((3,), (8,))]
    assert common_grid((11,), boxes) is None


def test_a_scalar_is_its_own_grid() -> None:
    assert common_grid((), [box((), ())]) == ()
    assert list(cells(whole(()), ())) == [box((), ())]


@pytest.mark.parametrize(
    ("grid", "shape", "itemsize", "split"),
    [
        ((64, 8), (64, 8), 4, (32, 8)),  # alone along dim 0: any split
        ((67, 8), (67, 8), 4, (23, 8)),
        ((60, 8), (180, 8), 4, (30, 8)),  # several cells: a divisor
        ((61, 8), (122, 8), 4, (61, 8)),  # a prime has none that is worth it
        ((1, 1024), (4, 1024), 4, (1, 256)),  # dim 0 is used up: the next one
        ((4, 2), (4, 2), 4, (4, 2)),
        ((2, 3, 1000), (2, 3, 1000), 1, (1, 1, 1000)),
    ],
)
def test_large_cells_are_split_in_contiguous_pieces(
    grid: tuple[int, ...], shape: tuple[int, ...], itemsize: int, split: tuple[int, ...]
) -> None:
    assert split_grid(grid, shape, itemsize, most=1024) == split
    assert split_grid(split, shape, itemsize, most=1024) == split


def test_cells_of_a_box_in_order() -> None:
    found = list(cells(box((4, 0), (5, 3)), (4, 3)))
    assert found == [box((4, 0), (4, 3)), box((8, 0), (1, 3))]
    assert is_cell(found[1], (4, 3), (9, 3))
    assert not is_cell(found[1], (4, 3), (10, 3))


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([box((0,), (3,))], "3 of 4 elements"),
        ([box((0,), (2,)), box((0,), (2,))], "written twice"),
        ([box((0,), (3,)), box((2,), (1,))], "overlap"),
        ([box((0,), (2,)), box((3,), (2,))], "outside"),
        ([box((0,), (2,)), box((2,), (2,))], None),
    ],
)
def test_what_is_wrong_with_a_cover_is_said(boxes: list[Box], said: str | None) -> None:
    found = fault_of_cover((4,), boxes)
    assert (found is None) if said is None else (found is not None and said in found)
