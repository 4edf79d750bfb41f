"""The cost of a loss is what the planner would find in the memory that is left."""

from __future__ import annotations

from itertools import combinations

import pytest

from holdfast.ckpt.memory.records import BlockEntry, ParityEntry, SidecarPeer, SnapshotWorld
from holdfast.ckpt.parity.stripes import Geometry
from holdfast.tools.dashboard.forecast import Held, LossForecast, forecast, groups_hit

NODES = tuple(f"n{number}" for number in range(8))
GROUPS = (NODES[:4], NODES[4:])


def world(parity: int) -> SnapshotWorld:
    return SnapshotWorld(
        run="r",
        generation=2,
        peers=tuple(SidecarPeer(node=name, address="") for name in NODES),
        rank_nodes=NODES,
        parity=parity,
        keep=1,
        groups=GROUPS,
    )


def held_by_all(guarded: SnapshotWorld) -> dict[str, Held]:
    entries = {
        rank: BlockEntry(
            generation=2,
            step=40,
            rank=rank,
            payload_bytes=1_000_000 + rank,
            index_bytes=100,
            index_crc32c=0,
        )
        for rank in range(len(NODES))
    }
    geometry = Geometry(guarded, entries)
    rows = {
        name: [
            ParityEntry(
                generation=2,
                step=40,
                stripe=stripe,
                row=row,
                nbytes=geometry.row_bytes(stripe),
                crc32c=0,
            )
            for stripe, row in geometry.rows_of(name)
        ]
        for name in NODES
    }
    return {
        name: Held(
            blocks=(entries[rank],), parities=tuple(rows[name]), sealed=tuple(entries.values())
        )
        for rank, name in enumerate(NODES)
    }


def told(parity: int, *lost: str, without_rows_of: str = "") -> LossForecast:
    guarded = world(parity)
    everything = held_by_all(guarded)
    asked = {name for group in groups_hit(guarded, lost) for name in group} - set(lost)
    held = {name: everything[name] for name in asked}
    if without_rows_of:
        kept = held[without_rows_of]
        held[without_rows_of] = Held(blocks=kept.blocks, sealed=kept.sealed)
    return forecast(lost, world=guarded, held=held, step=42, durable=30)


@pytest.mark.parametrize("parity", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_as_many_of_each_group_as_parity_covers_may_die(parity: int, size: int) -> None:
    for lost in combinations(NODES, size):
        found = told(parity, *lost)
        worst = max(sum(name in lost for name in group) for group in GROUPS)
        assert (found.step is not None) == (worst <= parity), lost
        if found.step is not None:
            assert (found.step, found.rebuilt, found.steps_lost) == (40, size, 2)
        else:
            assert (found.durable, found.steps_lost) == (30, 12)
            assert "cannot be restored" in found.reason
        assert (found.ranks, found.ranks_left) == (8, 8 - size)


def test_parity_that_is_not_there_yet_makes_a_loss_cost_more() -> None:
    assert told(1, "n0").step == 40
    assert any(told(1, "n0", without_rows_of=name).step is None for name in NODES[1:4])


def test_without_a_checkpoint_all_is_lost() -> None:
    guarded = world(1)
    found = forecast(("n0", "n1"), world=guarded, held={}, step=42, durable=None)
    assert (found.step, found.durable, found.steps_lost) == (None, None, 42)
