"""A point that does without lost stages has all that its other stages need."""

from __future__ import annotations

import msgspec
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.memory.records import BlockSource, RestorePoint, SidecarPeer, SnapshotWorld
from holdfast.elastic.neighbors.layers import StageTensor, map_stages
from holdfast.elastic.planning.neighbors import lost_places, without_lost


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[SnapshotWorld, int]:
    """A world of dp × pp × tp ranks, one node each, and the stages of each rank."""
    dp, pp, tp = (draw(st.integers(1, most)) for most in (2, 6, 2))
    nodes = tuple(f"n{rank}" for rank in range(dp * pp * tp))
    world = SnapshotWorld(
        run="r",
        generation=1,
        peers=tuple(SidecarPeer(node=node, address="tcp://a:1") for node in nodes),
        rank_nodes=nodes,
        parity=0,
        keep=1,
        pp=pp,
        tp=tp,
    )
    return world, draw(st.integers(1, 3))


def left_of(world: SnapshotWorld, lost: frozenset[int] = frozenset()) -> tuple[BlockSource, ...]:
    """Return the sources of all ranks that are not lost."""
    return tuple(
        BlockSource(rank=rank, node=node)
        for rank, node in enumerate(world.rank_nodes)
        if rank not in lost
    )


@st.composite
def remnants(draw: st.DrawFn, world: SnapshotWorld) -> list[RestorePoint]:
    steps = draw(st.lists(st.integers(0, 300), unique=True, max_size=4))
    ranks = list(range(len(world.rank_nodes)))
    return [
        RestorePoint(world=world, step=step, sources=left_of(world, frozenset(lost)))
        for step in sorted(steps, reverse=True)
        for lost in [draw(st.sets(st.sampled_from(ranks), max_size=4))]
    ]


@settings(max_examples=examples(150))
@given(data=st.data())
def test_a_point_without_lost_places_has_every_neighbour_and_no_near_point_beside_it(
    data: st.DataObject,
) -> None:
    world, per_rank = data.draw(pipelines())
    count = world.pp * per_rank
    layers = [StageTensor(f"layers.{s}.w", s, "float32", (2,)) for s in range(count)]
    stages = map_stages(layers, count=count)
    needs = {}
    for place in range(1, world.pp):
        own = range(place, count, world.pp)
        needs[place] = {near % world.pp for s in own for near in stages.neighbors(s)}
    left = data.draw(remnants(world))
    points = [each for each in left if not each.lost]
    if older := data.draw(st.none() | st.integers(0, 300)):
        before = msgspec.structs.replace(world, generation=0)
        points.append(RestorePoint(world=before, step=older, sources=left_of(before)))
    beyond = data.draw(st.integers(1, 150))
    found, why = without_lost(points, left, needs=needs, beyond=beyond)
    newest = max((each.step for each in points), default=0)
    if found is None:
        worth = [each for each in left if each.lost and each.step - newest > beyond]
        worth = worth if all(each.lost for each in left) else []
        assert bool(why) == bool(worth)
        return
    assert why == ""
    assert all(each.lost for each in left), "nothing of the generation is complete"
    assert found.step - newest > beyond
    lost = lost_places(found)
    assert 0 not in lost
    for place in lost:
        for stage in range(place, count, world.pp):
            assert stages.neighbors(stage)
            assert not {near % world.pp for near in stages.neighbors(stage)} & set(lost)
    for each in left:
        if each.lost and each.step - newest > beyond and set(lost_places(each)) <= set(lost):
            assert set(lost_places(each)) == set(lost)
            assert each.step <= found.step
    there = {source.rank for source in found.sources}
    assert there == {r for r in range(len(world.rank_nodes)) if world.place_of(r) not in lost}


@settings(max_examples=examples(100))
@given(
    counts=st.lists(st.integers(1, 3), min_size=2, max_size=5),
    widths=st.lists(st.integers(1, 2), min_size=15, max_size=15),
)
def test_every_source_is_of_a_neighbouring_stage_and_of_the_same_shape(
    counts: list[int], widths: list[int]
) -> None:
    tensors, number = [], 0
    for stage, layers in enumerate(counts):
        for _ in range(layers):
            tensors.append(StageTensor(f"l.{number}.w", stage, "float32", (widths[number],)))
            number += 1
    by_name = {each.fqn: each for each in tensors}
    found = map_stages(reversed(tensors), count=len(counts))
    for fqn, names in found.sources.items():
        own, near = by_name[fqn], found.neighbors(by_name[fqn].stage)
        assert tuple(by_name[name].stage for name in names) == near
        assert {by_name[name].shape for name in names} == {own.shape}
    unlike = {name for stage in found.unlike.values() for name in stage}
    assert len(found.sources) + len(unlike) == len(tensors)
    for stage in found.replaceable:
        assert all(t.fqn in found.sources for t in tensors if t.stage == stage)
