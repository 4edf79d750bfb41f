"""Regular grids over tensors: find the grid that the savers' boxes form, and split it. Pure.

Zarr needs every chunk of an array to be one cell of a regular grid, stored in full: a cell that
extends over the tensor's edge is padded. Sharding usually yields such cells: FSDP2 splits in pieces
of ``ceil(n / ranks)``, the last ones smaller. So a saver's box usually *is* a cell.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Final, TypeAlias

from holdfast.ckpt.geometry.layout import Box, at_origin
from holdfast.ckpt.geometry.spans import covers, spans_of

Shape: TypeAlias = tuple[int, ...]

PIECE_BYTES: Final = 16 << 20
"""Cells larger than this are split where the shape allows: the unit of verified reading."""

_MANY: Final = 32
"""From this number of boxes on, arrays are faster than one box after another."""

_LAYOUTS: Final = 16384
"""The number of tensor layouts that are cached: they are the same at every save."""

_POOR_SPLIT: Final = 16
"""A divisor whose pieces are smaller than requested by this factor is not used."""


def whole(shape: Shape) -> Box:
    """Return the box of the whole tensor."""
    return at_origin(shape)


def common_grid(shape: Shape, boxes: Iterable[Box]) -> Shape | None:
    """Return the cell shape of the regular grid that has each of ``boxes`` as a cell, or None.

    Empty boxes do not count; boxes need not cover the tensor.
    """
    full = [box for box in boxes if box.size]
    if not full:
        return None
    grid = tuple(max(extents) for extents in zip(*(box.shape for box in full), strict=True))
    return grid if all(is_cell(box, grid, shape) for box in full) else None


def is_cell(box: Box, grid: Shape, shape: Shape) -> bool:
    """Say whether ``box`` is a cell of ``grid``, cut off at the edge of ``shape``."""
    return all(
        o % g == 0 and n == min(g, s - o)
        for o, n, g, s in zip(box.offset, box.shape, grid, shape, strict=True)
    )


def _divisor(extent: int, at_most: int) -> int:
    """Return the largest divisor of ``extent`` that is no larger than ``at_most``."""
    return next(d for d in range(min(extent, at_most), 0, -1) if extent % d == 0)


def split_grid(grid: Shape, shape: Shape, itemsize: int, *, most: int = PIECE_BYTES) -> Shape:
    """Return a finer grid with cells of at most ``most`` bytes, where there is a good one.

    Leading dims are split first, so that a piece is contiguous in its cell. Along a dim with
    several cells the split must divide the cell; where it does not divide well, cells stay.
    """
    cell = list(grid)
    for dim in range(len(cell)):
        if prod(cell) * itemsize <= most:
            break
        wanted = max(most // (prod(cell) // cell[dim] * itemsize), 1)
        if grid[dim] >= shape[dim]:  # the only cell along this dim: any extent will do
            cell[dim] = -(-cell[dim] // -(-cell[dim] // wanted))
        elif (divisor := _divisor(cell[dim], wanted)) * _POOR_SPLIT >= wanted:
            cell[dim] = divisor
        if cell[dim] > 1:
            break
    return tuple(cell)


def chunk_cell(
    shape: Shape, boxes: Sequence[Box], agreed: Collection[Shape | None], itemsize: int
) -> Shape:
    """Return the cell of a tensor's Zarr chunks: that of all writers, or one for their ``boxes``.

    ``agreed`` are the cells that the writers know, None for a writer without a grid.
    """
    if not boxes:
        return tuple(max(n, 1) for n in shape)
    if len(agreed) == 1 and (cell := next(iter(agreed))) is not None:
        return cell
    if (grid := common_grid(shape, boxes)) is not None:
        return grid
    largest = tuple(max(extents) for extents in zip(*(box.shape for box in boxes), strict=True))
    return split_grid(largest, shape, itemsize)


def cells(box: Box, grid: Shape) -> Iterator[Box]:
    """Yield the parts of ``box`` in each cell of ``grid``, in C order."""
    if not box.size:
        return
    spans = [
        range(o // g * g, o + n, g) for o, n, g in zip(box.offset, box.shape, grid, strict=True)
    ]
    for corner in itertools.product(*spans):
        lo = tuple(max(c, o) for c, o in zip(corner, box.offset, strict=True))
        hi = tuple(
            min(c + g, o + n)
            for c, g, o, n in zip(corner, grid, box.offset, box.shape, strict=True)
        )
        yield Box(offset=lo, shape=tuple(h - o for o, h in zip(lo, hi, strict=True)))


def fault_of_cover(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Return a sentence if ``boxes`` do not cover ``shape`` exactly once, else None."""
    if len(boxes) < _MANY:
        return _fault_of_few(shape, tuple(boxes))
    offsets, shapes = [box.offset for box in boxes], [box.shape for box in boxes]
    spans = spans_of(offsets, shapes, dims=len(shape))
    if spans is not None and covers(shape, spans):
        return None
    return _fault_of_boxes(shape, boxes)


@lru_cache(_LAYOUTS)
def _fault_of_few(shape: Shape, boxes: tuple[Box, ...]) -> str | None:
    return _fault_of_boxes(shape, boxes)


def _fault_of_boxes(shape: Shape, boxes: Sequence[Box]) -> str | None:
    full = [box for box in boxes if box.size]
    total, found = prod(shape), sum(box.size for box in full)
    if found != total:
        return f"{found} of {total} elements are written"
    if len({(box.offset, box.shape) for box in full}) != len(full):
        return "a box is written twice"
    if common_grid(shape, full) is not None:  # different cells of one grid
        return None
    if fault := fault_of_overlap(full):
        return fault
    for box in full:
        if any(o + n > s for o, n, s in zip(box.offset, box.shape, shape, strict=True)):
            return f"{box} lies outside"
    return None


def fault_of_overlap(boxes: Sequence[Box]) -> str | None:
    """Return a sentence if two of the boxes, none of them empty, share an element."""
    overlap = _overlap(boxes)
    return f"{overlap[0]} and {overlap[1]} overlap" if overlap else None


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, by a sweep along the first dim."""
    if not boxes or not boxes[0].shape:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    sweep = max(range(len(boxes[0].shape)), key=lambda d: len({box.offset[d] for box in boxes}))
    live: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset[sweep]):
        live = [b for b in live if b.offset[sweep] + b.shape[sweep] > box.offset[sweep]]
        for other in live:
            if box.intersect(other):
                return other, box
        live.append(box)
    return None
