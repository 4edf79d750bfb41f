"""Plans between meshes: their refusals, their figures, their memory."""

from __future__ import annotations

import tracemalloc
from itertools import islice

import pytest

from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.layout import Box, Split, TensorSpec
from holdfast.ckpt.geometry.meshplan import MeshPlan
from holdfast.ckpt.geometry.partition import MeshLayout, Placed

MIB = 1 << 20


def layout(mesh: tuple[int, ...], *axes: Split | None, **shapes: tuple[int, ...]) -> MeshLayout:
    """Return a layout that treats every tensor alike."""
    return MeshLayout(
        mesh=mesh,
        tensors={
            fqn: Placed(spec=TensorSpec(fqn=fqn, dtype="bfloat16", shape=shape), axes=axes)
            for fqn, shape in shapes.items()
        },
    )


ROWS, COLUMNS = Split(dim=0), Split(dim=1)


def test_fsdp_over_tensor_parallel_cuts_inside_the_tensor_parallel_shard() -> None:
    saved = layout((2, 2), Split(dim=0, after=2), ROWS, w=(8, 3))
    first_rows = {rank: saved.boxes("w", rank)[0].offset[0] for rank in range(4)}
    assert first_rows == {0: 0, 2: 2, 1: 4, 3: 6}


@pytest.mark.parametrize("nested", [False, True])
def test_uneven_strided_shards_lie_as_whoever_cut_them_laid_them(nested: bool) -> None:
    spec = TensorSpec(fqn="w", dtype="bfloat16", shape=(7,))
    axes = (Split(dim=0, after=2), Split(dim=0))
    found = MeshLayout(mesh=(3, 2), tensors={"w": Placed(spec=spec, axes=axes, nested=nested)})
    last = [[(b.offset[0], b.shape[0]) for b in found.boxes("w", rank)] for rank in (4, 5)]
    assert last == ([[], [(6, 1)]] if nested else [[(6, 1)], []])


def test_a_plan_says_how_many_copies_and_bytes_it_is() -> None:
    saved = layout((4,), ROWS, a=(8, 6), b=(8, 6))
    wanted = layout((2, 3), None, COLUMNS, a=(8, 6), b=(8, 6))
    steps = MeshPlan(saved=saved, wanted=wanted)
    found = steps.describe()
    assert (found.overlaps, found.most_overlaps) == (2 * 4 * 3 * 2, 4 * 3 * 2)
    assert found.wanted_bytes == 2 * (8 * 6 * 2 * 2)
    assert str(found) == (
        "2 tensors from 4 to 6 ranks: 48 copies, 8.0 a rank, of 384 bytes in all; "
        "at most 24 copies of one tensor"
    )
    table = next(steps.of(4))
    assert (table.spec.fqn, table.source.tolist()) == ("a", [0, 1, 2, 3])
    assert table.wanted.box(int(table.box[0])) == Box(offset=(0, 2), shape=(8, 2))
    assert table.src[:, 1].tolist() == [0, 2]
    assert table.dst[:, 1].tolist() == [2, 0]
    assert table.sizes.tolist() == [4] * 4


def test_replicas_that_wrote_are_read_in_turns() -> None:
    saved = layout((3,), None, **{f"t{i}": (4,) for i in range(6)})
    wanted = layout((1,), None, **{f"t{i}": (4,) for i in range(6)})
    sources = [int(table.source[0]) for table in MeshPlan(saved=saved, wanted=wanted).of(0)]
    assert sorted(sources) == [0, 0, 1, 1, 2, 2]


def test_layouts_of_different_tensors_do_not_fit() -> None:
    saved, wanted = layout((2,), ROWS, a=(4,), b=(4,)), layout((1,), None, a=(5,), c=(4,))
    with pytest.raises(MismatchError, match="3 differences"):
        MeshPlan(saved=layout((2,), ROWS, a=(5,), b=(4,), d=(1,)), wanted=wanted)
    with pytest.raises(MismatchError, match=r"a is bfloat16 \[5\], saved is bfloat16 \[4\]"):
        MeshPlan(saved=saved, wanted=wanted, strict=False)


def test_without_strict_what_both_have_is_planned() -> None:
    steps = MeshPlan(
        saved=layout((2,), ROWS, a=(4,), b=(4,)),
        wanted=layout((1,), None, b=(4,), c=(4,)),
        strict=False,
    )
    assert {table.spec.fqn for table in steps.stream()} == {"b"}


def test_what_is_not_there_is_refused() -> None:
    steps = MeshPlan(saved=layout((2,), ROWS, a=(4,)), wanted=layout((3,), ROWS, a=(4,)))
    with pytest.raises(ValueError, match="rank 3 is not on mesh"):
        list(steps.of(3))
    with pytest.raises(ValueError, match="0 rows"):
        list(steps.stream(rows=0))
    with pytest.raises(ValueError, match="axis without ranks"):
        layout((2, 0), ROWS, None, a=(4,))
    with pytest.raises(ValueError, match="1 placements on mesh"):
        layout((2, 2), ROWS, a=(4,))
    with pytest.raises(ValueError, match="cut a dim"):
        layout((2,), COLUMNS, a=(4,))
    with pytest.raises(ValueError, match="less than one"):
        layout((2,), Split(dim=0, after=0), a=(4,))


def test_a_large_plan_is_streamed_in_little_memory() -> None:
    shapes = {f"t{i}": (4096 + 512 * i, 1024) for i in range(20)}
    steps = MeshPlan(
        saved=layout((512, 8), ROWS, COLUMNS, **shapes),
        wanted=layout((3, 1365), None, ROWS, **shapes),
    )
    tracemalloc.start()
    try:
        overlaps = sum(len(table) for table in steps.stream(rows=1 << 14))
        own = [len(table) for table in steps.of(4000, rows=1 << 14)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert overlaps == steps.describe().overlaps > 500_000
    assert sum(own) < overlaps / 1000
    assert peak < 24 * MIB


def test_one_tensor_of_more_copies_than_memory_is_streamed_too() -> None:
    saved = layout((16384,), ROWS, w=(16384, 16384))
    steps = MeshPlan(saved=saved, wanted=layout((16384,), COLUMNS, w=(16384, 16384)))
    tracemalloc.start()
    try:
        assert steps.describe().overlaps == 1 << 28
        assert all(len(table) == 1 << 14 for table in islice(steps.stream(rows=1 << 14), 20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 * MIB
