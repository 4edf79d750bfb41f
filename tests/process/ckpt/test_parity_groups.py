"""Several parity groups, and plain copies, among running sidecars."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.blocks import make_world
from sidecar_group import SidecarGroup, inventories, sidecar_group, write_step

from holdfast.ckpt.memory.records import SnapshotWorld
from holdfast.ckpt.parity.stripes import restore_points

NODES = ("a", "b", "c", "d")


def adopt(group: SidecarGroup, *, columns: int) -> SnapshotWorld:
    world = make_world(
        group.addresses(),
        run=group.run,
        parity=1,
        groups=(("a", "c"), ("d", "b")),
        columns=columns,
    )
    for client in group.clients.values():
        client.adopt(world, restore=None)
    return world


@pytest.mark.parametrize("columns", [0, 1])
def test_every_group_makes_good_a_loss_of_its_own(tmp_path: Path, columns: int) -> None:
    with sidecar_group(tmp_path, *NODES, threads=True) as group:
        world = adopt(group, columns=columns)
        payloads = write_step(group, world, 1, sizes=(300_000, 0, 70_001, 500_000))
        for lost in ("a", "d"):
            group.kill(lost, wipe=True)
        points, reason = restore_points(inventories(group))
        assert [(s.rank, s.rebuilt) for s in points[0].sources if s.rebuilt] == [
            (0, True),
            (3, True),
        ], reason
        group.adopt(generation=2, restore=points[0])
        for source in points[0].sources:
            client = group.clients[source.node]
            client.open_block(world, 1, source)
            wanted = payloads[source.rank]
            part = client.read(world, 1, source.rank, [(0, len(wanted))])[0] if wanted else b""
            assert part == wanted
