"""Slices select what numpy selects; tiles cut them in C order, without loss, within the bound."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ckpt.geometry.slicing import select, tiles

KEYS = st.one_of(
    st.integers(-2, 1),
    st.builds(
        slice,
        st.none() | st.integers(-9, 9),
        st.none() | st.integers(-9, 9),
        st.none() | st.integers(1, 4),
    ),
)


@given(
    shape=st.lists(st.integers(2, 7), min_size=1, max_size=3),
    keys=st.lists(KEYS, max_size=3),
    most=st.integers(1, 200),
    cell=st.integers(1, 4),
)
def test_tiles_one_after_the_other_are_the_selection(
    shape: list[int], keys: list[int | slice], most: int, cell: int
) -> None:
    array = np.arange(np.prod(shape)).reshape(shape)
    chosen = select(keys[: len(shape)], shape)
    wanted = array[tuple(keys[: len(shape)])]
    assert chosen.shape == wanted.shape
    found = []
    for tile in tiles(chosen, itemsize=8, most_bytes=most, cell=[cell] * len(shape)):
        box = tile.box
        assert np.prod(box.shape) * 8 <= most or tile.size == 1
        block = array[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        part = block[tile.within_box]
        assert array[tile.at(tile.size - 1)] == part.reshape(-1)[-1]
        found.append(part.reshape(-1))
    together = np.concatenate(found) if found else np.empty(0)
    np.testing.assert_array_equal(together, wanted.reshape(-1))
