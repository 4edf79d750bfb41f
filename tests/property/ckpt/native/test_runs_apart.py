"""The checksum of a whole from boxes of it, however it is cut, is that of its bytes in order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.native import isal
from holdfast.ckpt.native.runs_apart import share

ITEM = 4


def cut(box: Box, draw: st.DrawFn) -> Iterator[Box]:
    """Yield boxes that cover ``box``."""
    dims = [dim for dim, length in enumerate(box.shape) if length > 1]
    if not dims or draw(st.integers(0, 3)) == 0:
        yield box
        return
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, box.shape[dim] - 1))
    for start, length in ((0, at), (at, box.shape[dim] - at)):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim], shape[dim] = offset[dim] + start, length
        yield from cut(Box(offset=tuple(offset), shape=tuple(shape)), draw)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    return shape, list(cut(Box(offset=(0,) * len(shape), shape=shape), draw))


@settings(max_examples=examples(100), deadline=None)
@given(cuts(), st.integers(0, 2**32 - 1))
def test_the_shares_of_all_boxes_make_the_checksum(
    given_cuts: tuple[tuple[int, ...], list[Box]], seed: int
) -> None:
    shape, boxes = given_cuts
    whole = np.random.default_rng(seed).integers(0, 2**31, size=shape, dtype=np.int32)
    found = 0
    for box in boxes:
        at = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
        part = np.ascontiguousarray(whole[at])
        found ^= share(part.ctypes.data, box, shape=shape, itemsize=ITEM)
    packed = np.ascontiguousarray(whole)
    assert found == isal.crc64_at(packed.ctypes.data, packed.nbytes)


def test_an_empty_box_has_no_share() -> None:
    assert share(0, Box(offset=(0, 0), shape=(0, 4)), shape=(3, 4), itemsize=ITEM) == 0
