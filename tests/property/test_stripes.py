"""Any m of n nodes may vanish, whatever the sizes; what is more is refused; flips are seen."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.block import verify_block
from ckpt.erasure import Codec
from ckpt.errors import CorruptError
from ckpt.stripes import Geometry, Recovery, plan_recovery
from ckpt.testing.blocks import make_block, make_world, random_payload
from ckpt.world import BlockEntry, SnapshotWorld


class Simulation:
    """A group's blocks and parity rows, computed the plain way."""

    def __init__(self, world: SnapshotWorld, sizes: list[int]) -> None:
        self.entries: dict[int, BlockEntry] = {}
        self.blocks: dict[int, bytes] = {}
        for rank, size in enumerate(sizes):
            payload = random_payload(size, seed=(rank, size))
            made = make_block(payload, rank=rank, world_size=len(sizes))
            self.entries[rank], self.blocks[rank] = made
        self.world, self.geometry = world, Geometry(world, self.entries)
        self.codec = Codec(self.geometry.k, self.geometry.m)
        self.rows: dict[tuple[int, int], bytearray] = {}
        for node in self.geometry.nodes:
            for stripe, row in self.geometry.rows_of(node):
                self.rows[stripe, row] = bytearray(self.geometry.row_bytes(stripe))
        for node in self.geometry.nodes:
            for duty in self.geometry.duties_of(node):
                into = memoryview(self.rows[duty.stripe, duty.row])[: duty.nbytes]
                data = self.column(duty.stripe, duty.column, 0, duty.nbytes)
                self.codec.encode_update(duty.row, duty.column, data, into)

    def column(self, stripe: int, column: int, lo: int, hi: int) -> bytes:
        data = bytearray(hi - lo)
        for span in self.geometry.spans(stripe, column, lo, hi):
            part = self.blocks[span.rank][span.at : span.at + span.nbytes]
            data[span.into : span.into + span.nbytes] = part
        return bytes(data)

    def plan(self, rank: int, lost: set[str]) -> tuple[Recovery, ...] | None:
        holders = {r: node for r, node in enumerate(self.world.rank_nodes) if node not in lost}
        rows = {
            place: node
            for node in self.geometry.nodes
            if node not in lost
            for place in self.geometry.rows_of(node)
        }
        return plan_recovery(self.geometry, rank, holders=holders, rows=rows)[0]

    def rebuild(self, rank: int, plan: tuple[Recovery, ...]) -> bytes:
        block = bytearray(len(self.blocks[rank]))
        for each in plan:
            fragments = {
                read.column: self.column(each.stripe, read.column, each.lo, each.hi)
                for read in each.columns
            }
            for row in each.rows:
                data = bytes(self.rows[each.stripe, row.row][each.lo : each.hi])
                fragments[self.codec.k + row.row] = data
            into = memoryview(block)[each.at : each.at + each.hi - each.lo]
            self.codec.decode(each.column, fragments, into)
        return bytes(block)


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    n = draw(st.integers(2, 6))
    m = draw(st.integers(1, n - 1))
    names = [f"n{i}" for i in range(n)]
    homes = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2 * n))
    sizes = draw(st.lists(st.integers(0, 3000), min_size=len(homes), max_size=len(homes)))
    world = make_world(dict.fromkeys(names, "tcp://x"), rank_nodes=homes, parity=m)
    return Simulation(world, sizes)


@settings(max_examples=40, deadline=None)
@given(simulations())
def test_any_m_nodes_may_vanish(group: Simulation) -> None:
    names, m = group.geometry.nodes, group.geometry.m
    for lost in combinations(names, m):
        for rank, home in enumerate(group.world.rank_nodes):
            if home in lost:
                plan = group.plan(rank, set(lost))
                assert plan is not None
                assert group.rebuild(rank, plan) == group.blocks[rank]


@settings(max_examples=40, deadline=None)
@given(simulations(), st.data())
def test_what_is_refused_could_not_have_been_had(group: Simulation, data: st.DataObject) -> None:
    count = data.draw(st.integers(group.geometry.m, group.geometry.n))
    lost = set(data.draw(st.permutations(group.geometry.nodes))[:count])
    for rank, home in enumerate(group.world.rank_nodes):
        if home not in lost:
            continue
        plan = group.plan(rank, lost)
        if plan is not None:  # zeros behind short blocks may save more than m nodes
            assert group.rebuild(rank, plan) == group.blocks[rank]
        else:
            assert count > group.geometry.m


@settings(max_examples=60, deadline=None)
@given(simulations())
def test_every_piece_goes_to_m_holders_and_no_node_twice_into_a_stripe(group: Simulation) -> None:
    geometry = group.geometry
    for stripe in range(geometry.n):
        places = [geometry.node_of(stripe, number) for number in range(geometry.n)]
        assert sorted(places) == list(range(geometry.n))
    for node in geometry.nodes:
        duties = geometry.duties_of(node)
        assert all(duty.holder != node for duty in duties)
        sent = sum(duty.nbytes for duty in duties)
        assert sent == geometry.m * geometry.node_bytes[geometry.nodes.index(node)]


@settings(max_examples=30, deadline=None)
@given(simulations(), st.data())
def test_a_byte_flipped_anywhere_in_a_fragment_is_detected(
    group: Simulation, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(group.world.rank_nodes) - 1))
    plan = group.plan(rank, {group.world.rank_nodes[rank]})
    assert plan is not None
    places = [(each, row) for each in plan for row in each.rows]
    if not places:
        return
    each, row = data.draw(st.sampled_from(places))
    at = data.draw(st.integers(each.lo, each.hi - 1))
    group.rows[each.stripe, row.row][at] ^= 1 << data.draw(st.integers(0, 7))
    block = group.rebuild(rank, plan)
    assert block != group.blocks[rank]
    entry = group.entries[rank]
    differs = np.flatnonzero(
        np.frombuffer(block, np.uint8) != np.frombuffer(group.blocks[rank], np.uint8)
    )
    if entry.payload_bytes <= differs[0] < -(-entry.payload_bytes // 8) * 8:
        return  # the padding before the index means nothing
    with pytest.raises(CorruptError):
        verify_block(memoryview(block), entry, origin="rebuilt")
