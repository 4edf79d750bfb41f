"""Regions of a chunk arrive unchanged, and the whole chunk is verified on the way."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.format import checked_copy
from holdfast.ckpt.format.checked_copy import copy_chunk, copy_chunks
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.shard_index import Chunk, ChunkRef
from holdfast.ckpt.native.isal import crc32c


@st.composite
def cases(draw: st.DrawFn) -> tuple[Chunk, list[Box], int]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
    width = draw(st.sampled_from([1, 2, 4, 8]))
    regions = []
    for _ in range(draw(st.integers(1, 3))):
        lows = [draw(st.integers(0, n - 1)) for n in shape]
        extents = [draw(st.integers(1, n - lo)) for n, lo in zip(shape, lows, strict=True)]
        regions.append(Box(offset=tuple(lows), shape=tuple(extents)))
    if draw(st.booleans()):
        regions = [Box(offset=(0,) * len(shape), shape=shape)]
    box = Box(offset=tuple(draw(st.integers(0, 5)) for _ in shape), shape=shape)
    chunk = Chunk(box=box, at=0, nbytes=prod(shape) * width, crc32c=0)
    return chunk, regions, draw(st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("block_bytes", [8, 64, 1 << 18])
@settings(max_examples=examples(150), deadline=None)
@given(case=cases(), strided=st.booleans())
def test_every_region_arrives_and_the_whole_chunk_is_checked(
    block_bytes: int, case: tuple[Chunk, list[Box], int], strided: bool
) -> None:
    chunk, boxes, seed = case
    width = chunk.nbytes // chunk.box.size
    data = np.random.default_rng(seed).integers(0, 256, chunk.nbytes, dtype=np.uint8)
    kind = np.dtype(f"u{width}")
    whole = data.view(kind).reshape(chunk.box.shape)
    targets = []
    for box in boxes:
        room = np.zeros((*box.shape, 2 if strided else 1), dtype=kind)
        targets.append(room[..., 0])
    before, checked_copy.BLOCK_BYTES = checked_copy.BLOCK_BYTES, block_bytes
    try:
        crc = copy_chunk(chunk, data.data, list(zip(boxes, targets, strict=True)))
    finally:
        checked_copy.BLOCK_BYTES = before
    assert crc == crc32c(data)
    for box, target in zip(boxes, targets, strict=True):
        assert np.array_equal(target, whole[box.slices])


@settings(max_examples=examples(100), deadline=None)
@given(several=st.lists(cases(), max_size=5), strided=st.booleans())
def test_several_chunks_arrive_as_each_does_alone(
    several: list[tuple[Chunk, list[Box], int]], strided: bool
) -> None:
    deliveries, parts, alone = [], [], []
    for chunk, boxes, seed in several:
        kind = np.dtype(f"u{chunk.nbytes // chunk.box.size}")
        data = np.random.default_rng(seed).integers(0, 256, chunk.nbytes, dtype=np.uint8)
        rooms, others = (
            [np.zeros((*b.shape, 2 if strided else 1), dtype=kind)[..., 0] for b in boxes]
            for _ in range(2)
        )
        ref = ChunkRef(writer=0, fqn="x", dtype="uint8", chunk=chunk)
        deliveries.append((ref, list(zip(boxes, rooms, strict=True))))
        parts.append(data.data)
        alone.append((copy_chunk(chunk, data.data, list(zip(boxes, others, strict=True))), others))
    found = copy_chunks(deliveries, parts)
    assert found == [crc for crc, _ in alone]
    for (_, regions), (_, others) in zip(deliveries, alone, strict=True):
        for (_, room), other in zip(regions, others, strict=True):
            assert np.array_equal(room, other)


def test_what_is_checked_is_what_arrived() -> None:
    """A source that is overwritten while it is read cannot give a copy that passes."""
    data = bytearray(range(256)) * 16
    chunk = Chunk(
        box=Box(offset=(0,), shape=(len(data),)), at=0, nbytes=len(data), crc32c=crc32c(data)
    )
    target = np.zeros(len(data), dtype=np.uint8)
    changed = memoryview(bytearray(data))
    changed[100] ^= 1
    assert copy_chunk(chunk, changed, [(Box(offset=(0,), shape=(len(data),)), target)]) == crc32c(
        target
    )
    assert crc32c(target) != chunk.crc32c
