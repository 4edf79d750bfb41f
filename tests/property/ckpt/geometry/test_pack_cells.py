"""Checkpoints saved with arbitrary boxes read back, natively and as Zarr."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
from doubles.checkpoints import part_of, split_dim, write_checkpoint
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.checkpoints.assemble import Assembler
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.geometry.grid import cells, fault_of_cover, split_grid, whole
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.zarr.view import group

SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
WORLD_SIZE = 3


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape and one box per writer: a regular split, or slabs cut anywhere."""
    shape = draw(SHAPES)
    if not shape:
        return shape, [whole(())]
    dim = draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()):
        return shape, split_dim(shape, parts=draw(st.integers(1, WORLD_SIZE)), dim=dim)
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=2)))
    boxes = []
    for start, end in itertools.pairwise([0, *cuts, shape[dim]]):
        offset, extent = [0] * len(shape), list(shape)
        offset[dim], extent[dim] = start, end - start
        boxes.append(Box(offset=tuple(offset), shape=tuple(extent)))
    return shape, draw(st.permutations(boxes))


def regions(shape: Sequence[int]) -> st.SearchStrategy[Box]:
    """Draw a box inside ``shape``."""
    spans = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in shape))
    return spans.map(
        lambda pairs: Box(
            offset=tuple(min(pair) for pair in pairs),
            shape=tuple(max(pair) - min(pair) for pair in pairs),
        )
    )


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), lie=st.lists(layouts(), min_size=1, max_size=3), grids=st.booleans())
def test_any_layout_reads_back(
    data: st.DataObject, lie: list[tuple[tuple[int, ...], list[Box]]], grids: bool
) -> None:
    arrays = {
        f"t{i}": (np.arange(prod(shape), dtype="<i4").reshape(shape) + 1000 * i, "int32")
        for i, (shape, _) in enumerate(lie)
    }
    boxes = {f"t{i}": boxes for i, (_, boxes) in enumerate(lie)}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_checkpoint(root, arrays, boxes=boxes, world_size=WORLD_SIZE, with_grids=grids)
        assert list(faults(open_store(root), 1, deep=True)) == []
        with StoreSource(root, 1) as source:
            assembler, view = Assembler(source), group(source)
            for fqn, (array, _) in arrays.items():
                np.testing.assert_array_equal(view[fqn][...], array)
                region = data.draw(regions(array.shape))
                np.testing.assert_array_equal(assembler.box(fqn, region), part_of(array, region))


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple),
    parts=st.integers(1, 5),
    itemsize=st.sampled_from([1, 4]),
    most=st.integers(1, 600),
)
def test_a_split_refines_its_grid_in_contiguous_pieces(
    shape: tuple[int, ...], parts: int, itemsize: int, most: int
) -> None:
    boxes = [box for box in split_dim(shape, parts=parts) if box.size]
    grid = boxes[0].shape
    fine = split_grid(grid, shape, itemsize, most=most)
    found = [piece for box in boxes for piece in cells(box, fine)]
    assert fault_of_cover(shape, found) is None
    assert len(found) == len(list(cells(whole(shape), fine))), "a cell is cut by a box"
    for box in boxes:
        flat = np.arange(box.size).reshape(box.shape)
        order = [part_of(flat, _within(piece, box)).reshape(-1) for piece in cells(box, fine)]
        np.testing.assert_array_equal(np.concatenate(order), np.arange(box.size))


def _within(piece: Box, box: Box) -> Box:
    low = tuple(a - b for a, b in zip(piece.offset, box.offset, strict=True))
    return Box(offset=low, shape=piece.shape)
