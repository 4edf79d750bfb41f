"""A node's memory need: the actual sizes of its files, and the cost of parity."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from doubles.blocks import make_world

from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.records import SnapshotWorld
from holdfast.ckpt.parity.budget import FULL_IN_FLIGHT, SMALL_IN_FLIGHT, memory_need
from holdfast.ckpt.parity.row_file import RowFile

NODES = dict.fromkeys(("a", "b", "c", "d"), "tcp://x")
MIB = 1 << 20
made = partial(make_world, NODES)


def need(snapshots: SnapshotWorld, in_flight: int = FULL_IN_FLIGHT) -> tuple[float, float]:
    """Slots and parity of node a in shards of 12 MiB, but for the headers."""
    shards = dict.fromkeys(range(4), 12 * MIB)
    found = memory_need(snapshots, shards, node="a", slots_per_rank=snapshots.keep + in_flight)
    return round(found.slots / (12 * MIB), 2), round(found.parity / (12 * MIB), 2)


def test_parity_costs_m_of_k_and_a_replica_a_whole_copy() -> None:
    assert need(made(parity=1)) == (4, 1.33)  # four snapshots, a third of a shard each
    assert need(made(parity=2)) == (4, 4)  # two halves
    assert need(made(parity=1, columns=1)) == (4, 4)
    assert need(made(parity=0)) == (4, 0)


def test_the_smaller_mode_saves_one_slot_and_its_parity() -> None:
    assert need(made(parity=1), SMALL_IN_FLIGHT) == (3, 1)
    assert need(made(parity=1, keep=1), SMALL_IN_FLIGHT) == (2, 0.67)


def test_slots_are_counted_as_the_arena_makes_them(tmp_path: Path) -> None:
    for size in (1, 65_536, 65_537, 1_000_000):
        SlotFile.create(tmp_path / f"{size}.slot", size).close()
        found = memory_need(made(parity=1), {0: size}, node="a", slots_per_rank=1)
        assert found.slots == (tmp_path / f"{size}.slot").stat().st_size


def test_rows_are_counted_as_their_files_are_made(tmp_path: Path) -> None:
    RowFile.create(tmp_path / "a.row", 1_003_520).close()  # a copy of the rounded-up block
    copies = made(parity=1, keep=1, columns=1)
    found = memory_need(copies, {0: 1_000_000}, node="a", slots_per_rank=1)
    assert found.parity == (tmp_path / "a.row").stat().st_size


def test_unknown_ranks_count_as_the_longest_known() -> None:
    known = memory_need(made(parity=1), dict.fromkeys(range(4), MIB), node="b", slots_per_rank=4)
    assert memory_need(made(parity=1), {0: MIB}, node="b", slots_per_rank=4) == known


def test_a_node_without_ranks_holds_parity_alone() -> None:
    snapshots = make_world(NODES, rank_nodes=("a", "b", "c"), parity=1)
    found = memory_need(snapshots, {0: MIB}, node="d", slots_per_rank=4)
    assert found.slots == 0
    assert found.total == found.parity > 0


@pytest.mark.parametrize("node", ["a", "d", "z"])
def test_nothing_is_needed_for_nothing(node: str) -> None:
    snapshots = make_world(NODES, rank_nodes=(), parity=1)
    assert memory_need(snapshots, {}, node=node, slots_per_rank=4).total == 0
