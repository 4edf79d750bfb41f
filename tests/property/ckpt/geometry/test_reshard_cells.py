"""Between any two shardings every cell arrives once, with its own value."""

from __future__ import annotations

import itertools
import zlib
from math import prod
from unittest import mock

import numpy as np
import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from holdfast.ckpt.errors import CorruptError, MismatchError
from holdfast.ckpt.geometry.grid import fault_of_cover
from holdfast.ckpt.geometry.layout import (
    Box,
    Holding,
    Split,
    TensorSpec,
    choose_writers,
    shard_runs,
)
from holdfast.ckpt.geometry.reshard import MANY, plan
from holdfast.ckpt.geometry.shard_index import Chunk, ShardIndex, TensorEntry

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)
SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw a mesh and placements; return the box of every rank."""
    mesh = draw(MESHES)
    dims = st.sampled_from([None, *(Split(dim=d) for d in range(len(shape)))])
    axes = [draw(dims) for _ in mesh]
    return [
        shard_box(shape, mesh=mesh, coordinate=coordinate, axes=axes)
        for coordinate in itertools.product(*(range(n) for n in mesh))
    ]


def shard_box(
    shape: tuple[int, ...],
    *,
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    axes: list[Split | None],
) -> Box:
    """Return the one box that the rank at ``coordinate`` of ``mesh`` holds; it may be empty."""
    runs = shard_runs(shape, mesh=mesh, coordinate=coordinate, axes=axes)
    spans = [
        pieces[0] if pieces else (extent, 0) for pieces, extent in zip(runs, shape, strict=True)
    ]
    assert max((len(pieces) for pieces in runs), default=0) <= 1
    return Box(offset=tuple(start for start, _ in spans), shape=tuple(n for _, n in spans))


def cells(fqn: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor whose values tell its name and every index."""
    return np.arange(prod(shape), dtype=np.int64).reshape(shape) + (zlib.crc32(fqn.encode()) << 20)


def part(array: np.ndarray, box: Box) -> np.ndarray:
    return array[..., *(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


def save(tensors: dict[str, tuple[tuple[int, ...], list[Box]]]) -> tuple[list[ShardIndex], dict]:
    """Return the indexes of all writers and the chunks' contents."""
    world = max(len(boxes) for _, boxes in tensors.values())
    holdings: list[list[Holding]] = [[] for _ in range(world)]
    for fqn, (shape, boxes) in tensors.items():
        for rank in range(world):
            box = boxes[rank % len(boxes)]
            spec = TensorSpec(fqn=fqn, dtype="int64", shape=shape)
            holdings[rank].append(Holding(spec=spec, box=box, nbytes=box.size * 8))
    specs, writes = choose_writers(holdings)
    contents, indexes = {}, []
    for rank, written in enumerate(writes):
        at, entries = 0, {}
        for holding in written:
            fqn, box = holding.spec.fqn, holding.box
            chunk = Chunk(box=box, at=at, nbytes=holding.nbytes, crc32c=0)
            entries[fqn] = TensorEntry(dtype="int64", shape=holding.spec.shape, chunks=(chunk,))
            contents[rank, fqn, at] = part(cells(fqn, holding.spec.shape), box)
            at += holding.nbytes
        if rank == 0:
            for fqn, spec in specs.items():
                entries.setdefault(fqn, TensorEntry(dtype="int64", shape=spec.shape, chunks=()))
        indexes.append(
            ShardIndex(
                run="r",
                generation=1,
                step=1,
                writer=rank,
                world_size=world,
                payload_bytes=at,
                tensors=entries,
            )
        )
    return indexes, contents


@pytest.mark.parametrize("many", [0, MANY])
@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_every_wanted_cell_is_filled_once_with_its_value(many: int, data: st.DataObject) -> None:
    shapes = {f"t{i}": data.draw(SHAPES) for i in range(data.draw(st.integers(1, 3)))}
    have = {fqn: (shape, data.draw(shardings(shape))) for fqn, shape in shapes.items()}
    indexes, contents = save(have)
    want = {
        fqn: (
            TensorSpec(fqn=fqn, dtype="int64", shape=shape),
            tuple(data.draw(shardings(shape))),
        )
        for fqn, shape in shapes.items()
    }
    rooms = {fqn: [np.full(box.shape, -1) for box in boxes] for fqn, (_, boxes) in want.items()}
    filled = {fqn: [np.zeros(box.shape, int) for box in boxes] for fqn, (_, boxes) in want.items()}
    with mock.patch("holdfast.ckpt.geometry.reshard.MANY", many):
        reshard = plan(indexes, want)
    assert reshard.describe().wanted_bytes == 8 * sum(
        box.size for _, boxes in want.values() for box in boxes
    )
    for copy in reshard.copies:
        source = contents[copy.ref.writer, copy.ref.fqn, copy.ref.chunk.at]
        part(rooms[copy.fqn][copy.box], copy.dst)[...] = part(source, copy.src)
        part(filled[copy.fqn][copy.box], copy.dst)[...] += 1
    for fqn, (spec, boxes) in want.items():
        for box, room, count in zip(boxes, rooms[fqn], filled[fqn], strict=True):
            assert (count == 1).all()
            assert (room == part(cells(fqn, spec.shape), box)).all()
    assert len(reshard.refs()) == len({(r.writer, r.fqn, r.chunk.at) for r in reshard.refs()})


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_replicas_are_written_once_and_all_of_it_is_written(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    boxes = data.draw(shardings(shape))
    spec = TensorSpec(fqn="t", dtype="int64", shape=shape)
    _, writes = choose_writers([[Holding(spec=spec, box=b, nbytes=8 * b.size)] for b in boxes])
    written = [holding.box for part in writes for holding in part]
    assert len(set(written)) == len(written)
    assert set(written) == {box for box in boxes if box.size}
    assert fault_of_cover(shape, written) is None


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_replicas_are_spread_evenly(world: int, sizes: list[int]) -> None:
    holdings = []
    for i, n in enumerate(sizes):
        spec = TensorSpec(fqn=f"t{i:03d}", dtype="uint8", shape=(n,))
        holdings.append(Holding(spec=spec, box=Box(offset=(0,), shape=(n,)), nbytes=n))
    _, writes = choose_writers([holdings] * world)
    loads = [sum(holding.nbytes for holding in part) for part in writes]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_boxes_are_where_torch_puts_them(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple))
    mesh = data.draw(MESHES)
    dims = [data.draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    coordinate = [data.draw(st.integers(0, n - 1)) for n in mesh]
    axes = [None if d is None else Split(dim=d) for d in dims]
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    box = shard_box(shape, mesh=mesh, coordinate=coordinate, axes=axes)
    local, offset = _compute_local_shape_and_global_offset(shape, mesh, coordinate, placements)
    assert box.shape == tuple(local)
    assert not box.size or box.offset == tuple(offset)


def test_fsdp_over_tensor_parallel_cuts_the_tensor_parallel_shard() -> None:
    axes = [Split(dim=0, after=2), Split(dim=0)]
    starts = {
        (dp, tp): shard_box((12, 3), mesh=(3, 2), coordinate=(dp, tp), axes=axes).offset[0]
        for dp in range(3)
        for tp in range(2)
    }
    assert starts == {(0, 0): 0, (1, 0): 2, (2, 0): 4, (0, 1): 6, (1, 1): 8, (2, 1): 10}


@pytest.mark.parametrize("many", [0, MANY])
@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_a_lost_or_repeated_chunk_is_never_overlooked(many: int, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple))
    indexes, _ = save({"t": (shape, data.draw(shardings(shape)))})
    entries = [index.tensors.get("t") for index in indexes]
    victims = [i for i, entry in enumerate(entries) if entry is not None and entry.chunks]
    victim = data.draw(st.sampled_from(victims))
    spec = TensorSpec(fqn="t", dtype="int64", shape=shape)
    want = {"t": (spec, (Box(offset=(0,) * len(shape), shape=shape),))}
    with (
        mock.patch("holdfast.ckpt.geometry.reshard.MANY", many),
        pytest.raises((CorruptError, MismatchError)),
    ):
        plan(indexes[:victim] + indexes[victim + 1 :], want)
    whole = "t: the saved chunks are not the whole tensor"
    with (
        mock.patch("holdfast.ckpt.geometry.reshard.MANY", many),
        pytest.raises(CorruptError, match=whole),
    ):
        plan([*indexes, indexes[victim]], want)
