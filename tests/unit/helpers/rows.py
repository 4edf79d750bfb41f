"""Helpers of tests on parity rows: written blocks, compared rows, rebuilt nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from doubles.blocks import write_payload
from sidecar_group import SidecarGroup, inventories

from holdfast.ckpt.memory.records import SnapshotWorld
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.parity.stripes import Geometry, restore_points
from holdfast.ckpt.sidecar.parity import builder
from holdfast.ckpt.sidecar.parity.rows import ParityRow

MIB = 1 << 20
WAYS = pytest.mark.parametrize("by_wire", [False, True], ids=["mapped", "wire"])


def send_over_the_wire(group: SidecarGroup, *nodes: str) -> None:
    """Make sidecars fetch bytes as if every peer were on another host."""
    for node in nodes or tuple(group.sidecars):
        group.sidecars[node].core.host = f"host of {node}"


def write(group: SidecarGroup, world: SnapshotWorld, step: int, payloads: dict[int, bytes]) -> None:
    for rank, node in enumerate(world.rank_nodes):
        write_payload(group.clients[node], world, payloads[rank], step=step, rank=rank)


def is_intact(row: ParityRow) -> bool:
    """Return whether the bytes of a row are unchanged since it was sealed."""
    return crc32c(row.part(0, row.nbytes)) == row.entry.crc32c


def counted(group: SidecarGroup, name: str) -> int:
    return sum(sidecar.core.counters[name] for sidecar in group.sidecars.values())


def check_rows(group: SidecarGroup, world: SnapshotWorld, step: int) -> None:
    """Compare every parity row with one encoded here, from what the slots hold."""
    key = (world.generation, step)
    entries = group.sidecars["a"].core.book.snapshots[key].entries
    geometry = Geometry(world, entries)
    blocks = {}
    for rank, node in enumerate(world.rank_nodes):
        slot = group.sidecars[node].core.slots.holding((*key, rank))
        assert slot is not None
        blocks[rank] = slot.view()
    for node, sidecar in group.sidecars.items():
        for stripe, row in geometry.rows_of(node):
            found = sidecar.parities.get(key, (stripe, row))
            assert found is not None
            wanted = np.zeros(geometry.row_bytes(stripe), dtype=np.uint8)
            codec = builder.codec_named()(geometry.columns(stripe), geometry.m)
            for column in range(geometry.columns(stripe)):
                data = np.zeros_like(wanted)
                for span in geometry.spans(stripe, column, 0, len(wanted)):
                    part = blocks[span.rank][span.at : span.at + span.nbytes]
                    data[span.into : span.into + span.nbytes] = np.frombuffer(part, dtype=np.uint8)
                codec.encode_update(row, column, data.data, wanted.data)
            assert found.entry.crc32c == crc32c(wanted.data), (node, stripe, row)
            assert is_intact(found)


def rebuilt(group: SidecarGroup, world: SnapshotWorld, step: int, lost: str) -> dict[int, bytes]:
    """Lose a node; return what comes back of its blocks."""
    group.kill(lost, wipe=True)
    point = restore_points(inventories(group))[0][0]
    assert point.step == step
    found = {}
    for source in point.sources:
        if source.rebuilt:
            client = group.clients[source.node]
            nbytes = client.open_block(world, step, source).payload_bytes
            found[source.rank] = bytes(client.read(world, step, source.rank, [(0, nbytes)])[0])
    return found


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
