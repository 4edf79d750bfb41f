"""Any m nodes of a group may vanish at any sizes; more is refused; flips are detected."""

from __future__ import annotations

from itertools import combinations

import msgspec
import numpy as np
import pytest
from doubles.blocks import make_block, make_world, random_payload
from doubles.parity import ParityModel
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.memory.block import verify_block
from holdfast.ckpt.memory.records import BlockEntry, SnapshotWorld
from holdfast.ckpt.parity.stripes import ROOM_BYTES, Geometry


def model(world: SnapshotWorld, sizes: list[int], fixed: list[int]) -> ParityModel:
    """Return blocks of ``sizes``; of each, up to ``fixed`` bytes are its fixed part."""
    made = {}
    for rank, size in enumerate(sizes):
        payload = random_payload(size, seed=(rank, size))
        found, block = make_block(payload, rank=rank, world_size=len(sizes))
        fixed_bytes = min(size, fixed[rank])
        made[rank] = msgspec.structs.replace(found, fixed_bytes=fixed_bytes, fixed=1), block
    return ParityModel(world, made)


@st.composite
def worlds(draw: st.DrawFn) -> SnapshotWorld:
    m = draw(st.integers(1, 3))
    group_sizes = draw(st.lists(st.integers(m + 1, 6), min_size=1, max_size=2))
    names = draw(st.permutations([f"n{i}" for i in range(sum(group_sizes))]))
    rest = iter(names)
    homes = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2 * len(names)))
    return make_world(
        dict.fromkeys(sorted(names), "tcp://x"),
        rank_nodes=homes,
        parity=m,
        groups=tuple(tuple(next(rest) for _ in range(size)) for size in group_sizes),
        columns=draw(st.integers(0, min(group_sizes) - m)),
    )


@st.composite
def models(draw: st.DrawFn) -> ParityModel:
    world = draw(worlds())
    count = len(world.rank_nodes)
    lengths = st.lists(st.integers(0, 9000), min_size=count, max_size=count)
    return model(world, draw(lengths), draw(lengths | st.just([0] * count)))


@settings(max_examples=examples(40), deadline=None)
@given(models())
def test_any_m_nodes_of_each_group_may_vanish(parity_model: ParityModel) -> None:
    world = parity_model.world
    losses = [set(group[:2][: world.parity]) for group in world.parity_groups()]
    everywhere = set().union(*losses)
    for lost in (*losses, everywhere):
        for rank, home in enumerate(world.rank_nodes):
            if home in lost:
                plan, reason = parity_model.plan(rank, lost)
                assert plan is not None, reason
                assert parity_model.rebuild(rank, plan) == parity_model.blocks[rank]


@settings(max_examples=examples(40), deadline=None)
@given(models(), st.data())
def test_what_is_refused_could_not_have_been_had(
    parity_model: ParityModel, data: st.DataObject
) -> None:
    lost = set(data.draw(st.lists(st.sampled_from(parity_model.geometry.nodes), min_size=1)))
    for rank, home in enumerate(parity_model.world.rank_nodes):
        if home not in lost:
            continue
        plan, reason = parity_model.plan(rank, lost)
        if plan is not None:  # zeros behind short blocks, or distance, may save more than m
            assert parity_model.rebuild(rank, plan) == parity_model.blocks[rank]
            continue
        group = next(group for group in parity_model.world.parity_groups() if home in group)
        assert len(lost & set(group)) > parity_model.world.parity
        named = reason.split("those of nodes ")[1].removesuffix(" are missing").split(", ")
        assert home in named
        assert set(named) <= lost & set(group)


@settings(max_examples=examples(60), deadline=None)
@given(worlds(), st.data())
def test_every_byte_lies_in_one_piece_and_no_node_has_two_fragments_of_a_stripe(
    world: SnapshotWorld, data: st.DataObject
) -> None:
    entries = {
        rank: entry(rank, data.draw(st.integers(0, 99_999)), data.draw(st.integers(0, 50_000)))
        for rank in ranks(world)
    }
    geometry = Geometry(world, entries)
    groups = {name: group for group in world.parity_groups() for name in group}
    assert sorted(geometry.nodes) == sorted(groups)
    assert geometry.rows == sum(len(geometry.rows_of(node)) for node in geometry.nodes)
    for stripe in range(geometry.n):
        count = geometry.columns(stripe) + geometry.m
        nodes = [geometry.nodes[geometry.node_of(stripe, number)] for number in range(count)]
        assert len(set(nodes)) == count
        assert set(nodes) <= set(groups[nodes[0]])
        assert geometry.group_of(stripe) == groups[nodes[0]]
        for row in range(geometry.m):
            assert (stripe, row) in geometry.rows_of(nodes[geometry.columns(stripe) + row])
    for rank in ranks(world):
        at, length = 0, entries[rank].payload_bytes
        for stripe, column, lo, hi, start in geometry.pieces_of_block(rank):
            assert start == at
            assert 0 <= lo < hi <= geometry.filled_bytes(stripe, column)
            assert geometry.nodes[geometry.node_of(stripe, column)] == world.rank_nodes[rank]
            spans = geometry.spans(stripe, column, lo, hi)
            assert [(s.rank, s.at, s.nbytes, s.into) for s in spans] == [(rank, at, hi - lo, 0)]
            at += hi - lo
        assert at == length
    for stripe in range(geometry.n):
        fixed_bytes = geometry.fixed_row_bytes(stripe)
        for column in range(geometry.columns(stripe)):
            filled = geometry.filled_bytes(stripe, column)
            spans = geometry.spans(stripe, column, 0, geometry.piece_bytes(stripe))
            assert filled >= max((s.into + s.nbytes for s in spans), default=0)
            for span in spans:
                is_fixed = span.at < entries[span.rank].fixed_bytes
                assert (span.into + span.nbytes <= fixed_bytes) == is_fixed
                assert span.into >= fixed_bytes or is_fixed
        assert geometry.row_bytes(stripe) <= geometry.piece_bytes(stripe)


@settings(max_examples=examples(40), deadline=None)
@given(worlds(), st.data())
def test_the_parity_of_fixed_parts_does_not_move_with_the_rest(
    world: SnapshotWorld, data: st.DataObject
) -> None:
    fixed = {rank: data.draw(st.integers(0, 50_000)) for rank in ranks(world)}

    def placed(moving: int) -> list[object]:
        sizes = {rank: fixed[rank] + 8 + moving * (rank + 1) for rank in ranks(world)}
        found = Geometry(world, {r: entry(r, size, fixed[r]) for r, size in sizes.items()})
        return [
            (
                found.fixed_row_bytes(stripe),
                found.fixed_parts(stripe),
                found.spans(stripe, column, 0, found.fixed_row_bytes(stripe)),
            )
            for stripe in range(found.n)
            for column in range(found.columns(stripe))
        ]

    assert placed(data.draw(st.integers(0, 9000))) == placed(data.draw(st.integers(0, 9000)))


@settings(max_examples=examples(40), deadline=None)
@given(worlds(), st.integers(-30, 30))
def test_offsets_stay_put_while_the_index_wobbles(world: SnapshotWorld, wobble: int) -> None:
    sizes = {rank: ROOM_BYTES // 2 + rank * 5 * ROOM_BYTES for rank in ranks(world)}
    before = Geometry(world, {rank: entry(rank, size) for rank, size in sizes.items()})
    after = Geometry(world, {rank: entry(rank, size + wobble * 8) for rank, size in sizes.items()})
    for stripe in range(before.n):
        assert before.piece_bytes(stripe) == after.piece_bytes(stripe)
        assert before.row_bytes(stripe) == after.row_bytes(stripe)
    for rank in ranks(world):
        places = [(stripe, column, lo) for stripe, column, lo, *_ in before.pieces_of_block(rank)]
        moved = [(stripe, column, lo) for stripe, column, lo, *_ in after.pieces_of_block(rank)]
        assert places[: len(moved)] == moved[: len(places)]


def ranks(world: SnapshotWorld) -> range:
    return range(len(world.rank_nodes))


def entry(rank: int, nbytes: int, fixed: int = 0) -> BlockEntry:
    return BlockEntry(
        generation=1,
        step=1,
        rank=rank,
        payload_bytes=nbytes // 8 * 8,
        index_bytes=0,
        index_crc32c=0,
        fixed_bytes=min(fixed, nbytes // 8 * 8),
        fixed=1,
    )


@settings(max_examples=examples(30), deadline=None)
@given(models(), st.data())
def test_a_byte_flipped_anywhere_in_a_fragment_is_detected(
    parity_model: ParityModel, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(parity_model.world.rank_nodes) - 1))
    plan, _ = parity_model.plan(rank, {parity_model.world.rank_nodes[rank]})
    assert plan is not None
    places = [(each, row) for each in plan for row in each.rows]
    each, row = data.draw(st.sampled_from(places))
    at = data.draw(st.integers(each.lo, each.hi - 1))
    parity_model.rows[each.stripe, row.row][at] ^= 1 << data.draw(st.integers(0, 7))
    block = parity_model.rebuild(rank, plan)
    assert block != parity_model.blocks[rank]
    wanted = parity_model.entries[rank]
    differs = np.flatnonzero(
        np.frombuffer(block, np.uint8) != np.frombuffer(parity_model.blocks[rank], np.uint8)
    )
    if wanted.payload_bytes <= differs[0] < -(-wanted.payload_bytes // 8) * 8:
        return  # the padding before the index means nothing
    with pytest.raises(CorruptError):
        verify_block(memoryview(block), wanted, origin="rebuilt")


def shapes() -> list[tuple[int, int, int]]:
    """All (nodes, parity, columns) up to six nodes and three rows; 0 columns is the default."""
    return [
        (n, m, columns)
        for n in range(2, 7)
        for m in range(1, min(n, 4))
        for columns in range(n - m)  # n - m itself is what 0 stands for
    ]


@pytest.mark.parametrize(("n", "m", "columns"), shapes())
def test_every_loss_of_m_nodes_is_made_good_and_larger_ones_are_told(
    n: int, m: int, columns: int
) -> None:
    nodes = [f"n{i}" for i in range(n)]
    homes = [nodes[0], nodes[0], *nodes[1 : n - 1]] if n > 2 else nodes  # the last one is bare
    sizes = [5000, 0, 9000, 1, 4096, 12_345][: len(homes)]
    world = make_world(dict.fromkeys(nodes, "tcp://x"), rank_nodes=homes, parity=m, columns=columns)
    parity_model = model(world, sizes, [size // 3 for size in sizes])
    refused = 0
    for count in range(1, n + 1):
        for lost in map(set, combinations(nodes, count)):
            for rank, home in enumerate(homes):
                if home not in lost:
                    continue
                plan, reason = parity_model.plan(rank, lost)
                if plan is not None:
                    assert parity_model.rebuild(rank, plan) == parity_model.blocks[rank], (
                        rank,
                        lost,
                    )
                    continue
                refused += 1
                assert count > m, reason
                assert reason.startswith("stripe ")
                assert home in reason
    assert refused
