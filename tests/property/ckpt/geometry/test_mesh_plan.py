"""The joint computation for all ranks equals the computation of each rank by itself."""

from __future__ import annotations

import itertools
from collections import Counter
from math import prod

import numpy as np
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.geometry.grid import fault_of_cover
from holdfast.ckpt.geometry.layout import Box, Split, TensorSpec, is_nested, regions_of, shard_runs
from holdfast.ckpt.geometry.meshplan import MeshPlan, Moves, blocks
from holdfast.ckpt.geometry.partition import MeshLayout, Placed
from holdfast.ckpt.geometry.reshard import plan
from holdfast.ckpt.geometry.shard_index import Chunk, ShardIndex, TensorEntry
from holdfast.ckpt.geometry.spans import covers, overlap, spans_of

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def placements(draw: st.DrawFn, spec: TensorSpec, mesh: tuple[int, ...]) -> Placed:
    """Draw the placement of each axis: replicate, shard, or shard in blocks (FSDP2, or any)."""
    dims = st.sampled_from([None, *range(len(spec.shape))])
    cut = [draw(dims) for _ in mesh]
    axes = [None if dim is None else Split(dim=dim) for dim in cut]
    strided = draw(st.sampled_from(["never", "as FSDP2", "any"]))
    for a, dim in enumerate(cut):
        if dim is None or strided == "never" or (strided == "any" and draw(st.booleans())):
            continue
        right = prod(mesh[b] for b in range(a + 1, len(mesh)) if cut[b] == dim)
        axes[a] = Split(dim=dim, after=right if strided == "as FSDP2" else draw(st.integers(1, 3)))
    nested = draw(st.booleans()) if is_nested(mesh=mesh, axes=axes) else False
    return Placed(spec=spec, axes=tuple(axes), nested=nested)


@st.composite
def layouts(draw: st.DrawFn, specs: list[TensorSpec]) -> MeshLayout:
    """Draw a mesh and where it has each tensor."""
    mesh = draw(MESHES)
    return MeshLayout(mesh=mesh, tensors={s.fqn: draw(placements(s, mesh)) for s in specs})


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    """Draw a few tensors, the same shape more than once as a rule."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=3))
    chosen = draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=4))
    return [TensorSpec(fqn=f"t{i}", dtype="int32", shape=shape) for i, shape in enumerate(chosen)]


def pairs() -> st.SearchStrategy[tuple[MeshLayout, MeshLayout]]:
    return specs().flatmap(lambda found: st.tuples(layouts(found), layouts(found)))


def held_one_by_one(layout: MeshLayout, fqn: str) -> list[tuple[Box, ...]]:
    """Return the boxes of every rank by the rules that a single rank follows."""
    placed = layout.tensors[fqn]
    return [
        tuple(
            region.box
            for region in regions_of(
                shard_runs(
                    placed.spec.shape,
                    mesh=layout.mesh,
                    coordinate=coordinate,
                    axes=placed.axes,
                    nested=placed.nested,
                )
            )
        )
        for coordinate in itertools.product(*map(range, layout.mesh))
    ]


def rows(tables: list[Moves]) -> list[tuple[object, ...]]:
    """Return every row of every table."""
    return [
        (t.spec.fqn, *numbers, *map(tuple, regions))
        for t in tables
        for numbers, regions in zip(
            zip(*(c.tolist() for c in (t.source, t.target, t.cell, t.box)), strict=True),
            zip(*(c.T.tolist() for c in (t.src, t.dst, t.shape)), strict=True),
            strict=True,
        )
    ]


@settings(max_examples=examples(200), deadline=None)
@given(specs().flatmap(layouts))
def test_every_rank_holds_what_it_would_find_by_itself(layout: MeshLayout) -> None:
    found = layout.layout()
    for fqn, placed in layout.tensors.items():
        assert found.specs[fqn] == placed.spec
        for ours, theirs in zip(found.boxes[fqn], held_one_by_one(layout, fqn), strict=True):
            assert len(set(ours)) == len(ours)
            assert set(ours) == set(theirs)


@settings(max_examples=examples(150), deadline=None)
@given(pairs())
def test_every_wanted_cell_comes_once_from_a_rank_that_has_it(
    pair: tuple[MeshLayout, MeshLayout],
) -> None:
    saved, wanted = pair
    seen: dict[tuple[str, int], np.ndarray] = {
        (fqn, rank): np.zeros(placed.spec.shape, dtype=int)
        for fqn, placed in wanted.tensors.items()
        for rank in range(wanted.world_size)
    }
    for table in MeshPlan(saved=saved, wanted=wanted).stream():
        for fqn, source, target, cell, box, src, dst, shape in rows([table]):
            chunk, room = table.saved.box(cell), table.wanted.box(box)
            assert chunk in held_one_by_one(saved, fqn)[source]
            assert room in held_one_by_one(wanted, fqn)[target]
            at = tuple(o + s for o, s in zip(chunk.offset, src, strict=True))
            assert at == tuple(o + d for o, d in zip(room.offset, dst, strict=True))
            region = Box(offset=at, shape=shape)
            assert region.intersect(chunk) == region == region.intersect(room)
            seen[fqn, target][tuple(slice(o, o + n) for o, n in zip(at, shape, strict=True))] += 1
    for (fqn, rank), counts in seen.items():
        needed = np.zeros_like(counts)
        for box in held_one_by_one(wanted, fqn)[rank]:
            needed[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
        assert (counts == needed).all()


@settings(max_examples=examples(150), deadline=None)
@given(pairs(), st.integers(1, 9))
def test_a_ranks_own_plan_is_its_part_of_the_whole_plan(
    pair: tuple[MeshLayout, MeshLayout], most: int
) -> None:
    steps = MeshPlan(saved=pair[0], wanted=pair[1])
    whole = Counter(rows(list(steps.stream())))
    in_parts = list(steps.stream(rows=most))
    assert all(0 < len(table) <= most for table in in_parts)
    assert Counter(rows(in_parts)) == whole
    own: Counter[tuple[object, ...]] = Counter()
    for rank in range(pair[1].world_size):
        mine = rows(list(steps.of(rank, rows=most)))
        assert all(row[2] == rank for row in mine)
        own.update(mine)
    assert own == whole
    about = steps.describe()
    assert about.overlaps == whole.total() == sum(map(len, steps.stream()))
    assert about.wanted_bytes == 4 * sum(int(table.sizes.sum()) for table in in_parts)


@settings(max_examples=examples(100), deadline=None)
@given(pairs())
def test_indexes_of_the_saved_layout_give_the_same_plan(
    pair: tuple[MeshLayout, MeshLayout],
) -> None:
    saved, wanted = pair
    turns = saved.turns()
    entries: list[dict[str, TensorEntry]] = [{} for _ in range(saved.world_size)]
    for fqn, placed in saved.tensors.items():
        partition = saved.partition(fqn)
        chunks: list[list[Chunk]] = [[] for _ in entries]
        for cell, writer in enumerate(saved.writers(fqn, turn=turns[fqn]).tolist()):
            box = partition.box(cell)
            assert box in held_one_by_one(saved, fqn)[writer]
            chunks[writer].append(Chunk(box=box, at=cell, nbytes=box.size * 4, crc32c=0))
        for writer, found in enumerate(chunks):
            entries[writer][fqn] = TensorEntry(
                dtype="int32", shape=placed.spec.shape, chunks=tuple(found)
            )
    have = [
        ShardIndex(
            run="r",
            generation=1,
            step=1,
            writer=writer,
            world_size=len(entries),
            payload_bytes=0,
            tensors=tensors,
        )
        for writer, tensors in enumerate(entries)
    ]
    steps = MeshPlan(saved=saved, wanted=wanted)
    for rank in range(wanted.world_size):
        want = {f: (p.spec, wanted.boxes(f, rank)) for f, p in wanted.tensors.items()}
        copies = Counter(
            (c.fqn, c.ref.writer, c.ref.chunk.at, want[c.fqn][1][c.box], c.src, c.dst)
            for c in plan(have, want).copies
        )
        moves = Counter(
            (
                fqn,
                source,
                cell,
                wanted.partition(fqn).box(box),
                Box(offset=src, shape=shape),
                Box(offset=dst, shape=shape),
            )
            for fqn, source, _, cell, box, src, dst, shape in rows(list(steps.of(rank)))
        )
        assert moves == copies


@settings(max_examples=examples(80), deadline=None)
@given(specs().flatmap(layouts), st.integers(1, 20))
def test_replicas_write_the_same_within_one_share_of_each_kind_of_tensor(
    layout: MeshLayout, times: int
) -> None:
    tensors = {
        f"{fqn}.{i:02d}": Placed(
            spec=TensorSpec(fqn=f"{fqn}.{i:02d}", dtype="int32", shape=placed.spec.shape),
            axes=placed.axes,
            nested=placed.nested,
        )
        for fqn, placed in layout.tensors.items()
        for i in range(times)
    }
    layout = MeshLayout(mesh=layout.mesh, tensors=tensors)
    turns = layout.turns()
    kinds: dict[tuple[int, ...], dict[object, int]] = {}
    loads: dict[tuple[int, ...], np.ndarray] = {}
    for fqn, placed in tensors.items():
        alike = tuple(a for a, split in enumerate(placed.axes) if split is None)
        partition = layout.partition(fqn)
        sizes = np.array([partition.box(cell).size for cell in range(partition.cells)])
        kind = (placed.spec.shape, placed.axes, placed.nested)
        counts = np.bincount(partition.holders(np.arange(len(sizes))), sizes, minlength=1)
        kinds.setdefault(alike, {})[kind] = int(counts.max())
        load = loads.setdefault(alike, np.zeros(layout.world_size, dtype=int))
        np.add.at(load, layout.writers(fqn, turn=turns[fqn]), sizes)
    for alike, load in loads.items():
        by_replica = np.moveaxis(load.reshape(layout.mesh), alike, range(len(alike)))
        by_replica = by_replica.reshape(prod(by_replica.shape[: len(alike)]), -1)
        spread = by_replica.max(axis=0) - by_replica.min(axis=0)
        assert spread.max() <= sum(kinds[alike].values())


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_where_all_divides_replicas_write_within_the_largest_cell_of_the_same(
    tensors: list[tuple[int, bool]], replicas: int, parts: int
) -> None:
    cut, kept = (None, Split(dim=0)), (None, None)
    placed = {
        f"t{i}": Placed(
            spec=TensorSpec(fqn=f"t{i}", dtype="int32", shape=(rows * parts,)),
            axes=cut if sharded else kept,
        )
        for i, (rows, sharded) in enumerate(tensors)
    }
    for chosen in (cut, kept):
        layout = MeshLayout(
            mesh=(replicas, parts),
            tensors={fqn: p for fqn, p in placed.items() if p.axes == chosen},
        )
        turns = layout.turns()
        load, largest = np.zeros(layout.world_size, dtype=int), 0
        for fqn in layout.tensors:
            size = layout.partition(fqn).box(0).size
            largest = max(largest, size)
            np.add.at(load, layout.writers(fqn, turn=turns[fqn]), size)
        per_part = load.reshape(replicas, parts) if chosen == cut else load.reshape(-1, 1)
        assert (per_part.max(axis=0) - per_part.min(axis=0)).max() <= largest


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 5), min_size=0, max_size=4), st.integers(1, 30))
def test_blocks_hold_every_element_once_and_no_more_than_asked(sizes: list[int], most: int) -> None:
    seen = np.zeros(sizes, dtype=int)
    for block in blocks(sizes, most):
        assert 0 < seen[block].size <= most
        seen[block] += 1
    assert (seen == 1).all()


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw boxes that often cover a tensor exactly: cut in two again and again, then disturbed."""
    shape = draw(st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple))
    found = [Box(offset=(0,) * len(shape), shape=shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        offset, one, other = list(box.offset), list(box.shape), list(box.shape)
        one[dim], other[dim] = at, box.shape[dim] - at
        found.append(Box(offset=box.offset, shape=tuple(one)))
        offset[dim] += at
        found.append(Box(offset=tuple(offset), shape=tuple(other)))
    match draw(st.sampled_from(["nothing", "nothing", "lose", "repeat", "move"])):
        case "lose":
            found.pop()
        case "repeat":
            found.append(draw(st.sampled_from(found)))
        case "move" if shape:
            box = found.pop()
            offset = [max(o + draw(st.integers(-1, 1)), 0) for o in box.offset]
            found.append(Box(offset=tuple(offset), shape=box.shape))
    return shape, found


@settings(max_examples=examples(400), deadline=None)
@given(boxes())
def test_a_cover_is_judged_alike_by_arrays_one_by_one_and_by_counting(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, found = case
    room = np.zeros([n + 2 for n in shape], dtype=int)
    for box in found:
        room[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
    inside = room[tuple(slice(0, n) for n in shape)]
    exact = bool((inside == 1).all() and room.sum() == inside.sum())
    spans = spans_of([b.offset for b in found], [b.shape for b in found], dims=len(shape))
    assert spans is not None
    assert covers(shape, spans) == exact
    assert (fault_of_cover(shape, found) is None) == exact
    assert overlap(spans.take(spans.full)) == bool((room > 1).any())
