"""Covers of many boxes are checked with arrays, with the same messages as for few boxes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from holdfast.ckpt.geometry.grid import fault_of_cover
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.spans import covers, expand, overlap, spans_of


def rows(*cuts: int, width: int = 3) -> list[Box]:
    """Return the boxes between neighbouring cuts of the first dim."""
    return [Box(offset=(lo, 0), shape=(hi - lo, width)) for lo, hi in itertools.pairwise(cuts)]


def covered(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    spans = spans_of([b.offset for b in boxes], [b.shape for b in boxes], dims=len(shape))
    assert spans is not None
    return covers(shape, spans)


def test_cuts_of_any_length_cover() -> None:
    cuts = [i * (i + 1) // 2 for i in range(100)]
    assert covered((cuts[-1], 3), rows(*cuts)[::-1])
    assert fault_of_cover((cuts[-1], 3), rows(*cuts)) is None


def test_a_brick_wall_covers_though_it_is_no_grid() -> None:
    wall = []
    for row in range(20):
        cuts = [0, 4, 8, 12] if row % 2 else [0, 2, 6, 10, 12]
        wall += [Box(offset=(row, lo), shape=(1, hi - lo)) for lo, hi in itertools.pairwise(cuts)]
    assert covered((20, 12), wall)
    assert fault_of_cover((20, 12), wall) is None


def test_boxes_that_begin_alike_and_end_apart_are_no_grid() -> None:
    boxes = [
        Box(offset=(0, 0), shape=(4, 1)),
        Box(offset=(0, 1), shape=(2, 1)),
        Box(offset=(2, 0), shape=(2, 1)),
    ]
    assert sum(box.size for box in boxes) == 4 * 2
    assert not covered((4, 2), boxes)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda boxes: boxes[1:], "297 of 300 elements are written"),
        (lambda boxes: [*boxes[1:], boxes[1]], "a box is written twice"),
        (lambda boxes: [*boxes[:-3], *rows(97, 99), boxes[-2]], "overlap"),
        (lambda boxes: [*boxes[:-1], *rows(100, 101)], "lies outside"),
    ],
)
def test_what_is_wrong_with_many_boxes_is_said(spoil, fault: str) -> None:
    found = fault_of_cover((100, 3), spoil(rows(*range(101))))
    assert found is not None
    assert fault in found


def test_numbers_that_no_tensor_has_are_refused_without_overflow() -> None:
    step = 2**70
    boxes = [Box(offset=(i * step,), shape=(step,)) for i in range(40)]
    assert spans_of([b.offset for b in boxes], [b.shape for b in boxes], dims=1) is None
    assert fault_of_cover((40 * step,), boxes) is None
    wide = [Box(offset=(i, 0), shape=(1, 2**61)) for i in range(40)]
    assert not covered((40, 2**61), wide)
    assert fault_of_cover((8, 8), wide) is not None
    empty = [Box(offset=(0, 0), shape=(0, 2**61))] * 40
    assert fault_of_cover((0, 2**80), empty) is None


def test_boxes_of_other_dims_are_no_spans() -> None:
    assert spans_of([(0,), (0, 0, 0)], [(1,), (1, 1, 1)], dims=2) is None


def test_overlap_is_found_wherever_it_is() -> None:
    apart = spans_of([(i, i % 7) for i in range(500)], [(3, 1)] * 500, dims=2)
    assert apart is not None
    assert not overlap(apart)
    touching = spans_of([(i, i % 7) for i in range(500)], [(8, 1)] * 500, dims=2)
    assert touching is not None
    assert overlap(touching)


def test_expand_lists_runs_one_after_another() -> None:
    ones, others = expand(np.array([5, 2, 9]), np.array([2, 0, 3]))
    assert list(zip(ones.tolist(), others.tolist(), strict=True)) == [
        (0, 5),
        (0, 6),
        (2, 9),
        (2, 10),
        (2, 11),
    ]
