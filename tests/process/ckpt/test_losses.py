"""Every set of lost nodes among running sidecars: m are rebuilt bit for bit, more are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import msgspec
import pytest
from sidecar_group import SidecarGroup, sidecar_group, write_step

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.memory.records import BlockSource, Inventory, SnapshotWorld
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.client import SidecarClient

NOBODY = "tcp://127.0.0.1:1"
SIZES = {1: (70_001, 30_000, 0, 150_003, 1, 4096), 2: tuple(range(90_001, 90_007))}
"""Bytes of the ranks by step: where blocks are short, more than m may be lost by luck."""

SHAPES = [(n, m) for n in range(2, 7) for m in range(1, min(n, 4))]


def without(world: SnapshotWorld, lost: set[str]) -> SnapshotWorld:
    """The world without the lost nodes."""
    peers = tuple(
        msgspec.structs.replace(peer, address=NOBODY) if peer.node in lost else peer
        for peer in world.peers
    )
    return msgspec.structs.replace(world, peers=peers)


@contextmanager
def bystander(group: SidecarGroup, number: int) -> Iterator[SidecarClient]:
    """A node that holds nothing, and is asked to rebuild what others have lost."""
    name = f"x{number}"
    group.start(name)
    try:
        yield group.clients[name]
    finally:
        group.kill(name, wipe=True)


@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_every_loss_of_m_nodes_is_rebuilt_from_the_others_and_one_more_is_refused(
    tmp_path: Path, n: int, m: int
) -> None:
    nodes = tuple(f"n{i}" for i in range(n))
    with sidecar_group(tmp_path, *nodes, threads=True) as group:
        world = group.adopt(parity=m)
        payloads = {
            step: write_step(group, world, step, sizes=sizes) for step, sizes in SIZES.items()
        }
        kept = {node: group.clients[node].inventory() for node in nodes}
        for lost in subsets(nodes, at_most=m):
            points, reason = restore_points(remaining(kept, lost))
            assert [point.step for point in points] == [2, 1], reason
        for number, lost in enumerate(subsets(nodes, at_most=m + 1)):
            if len(lost) == m:  # smaller losses leave more
                with bystander(group, number) as client:
                    for step in SIZES:
                        rebuilt(client, without(world, lost), lost, payloads[step], step=step)
            elif len(lost) > m:
                refused(world, lost, remaining(kept, lost))
        with bystander(group, -1) as client:
            asked_in_vain(client, world, set(nodes[: m + 1]))


def subsets(nodes: tuple[str, ...], *, at_most: int) -> list[set[str]]:
    return [set(lost) for count in range(1, at_most + 1) for lost in combinations(nodes, count)]


def remaining(kept: Mapping[str, Inventory], lost: set[str]) -> list[Inventory]:
    return [inventory for node, inventory in kept.items() if node not in lost]


def rebuilt(
    client: SidecarClient,
    world: SnapshotWorld,
    lost: set[str],
    payloads: Mapping[int, bytes],
    *,
    step: int,
) -> None:
    """Every block of the lost nodes comes back bit for bit."""
    for rank, home in enumerate(world.rank_nodes):
        if home in lost:
            source = BlockSource(rank=rank, node="x", rebuilt=True)
            client.open_block(world, step, source)
            (part,) = client.read(world, step, rank, [(0, len(payloads[rank]))])
            assert part == payloads[rank], (rank, lost, step)


def refused(world: SnapshotWorld, lost: set[str], left: list[Inventory]) -> None:
    """No restore point is offered, and the missing nodes are named."""
    points, reason = restore_points(left)
    assert 2 not in [point.step for point in points]
    if left:
        about_step_2 = reason.split("step 1 ")[0]
        assert f"the block of rank {first_lost(world, lost)} " in about_step_2
        assert missing(about_step_2) == lost


def asked_in_vain(client: SidecarClient, world: SnapshotWorld, lost: set[str]) -> None:
    """No bytes are invented either."""
    source = BlockSource(rank=first_lost(world, lost), node="x", rebuilt=True)
    with pytest.raises(NotFoundError) as caught:
        client.open_block(without(world, lost), 2, source)
    if len(lost) < len(world.peers):
        assert missing(str(caught.value)) == lost


def first_lost(world: SnapshotWorld, lost: set[str]) -> int:
    return min(rank for rank, home in enumerate(world.rank_nodes) if home in lost)


def missing(words: str) -> set[str]:
    names = words.split("those of nodes ")[1].partition(" are missing")[0]
    return set(names.split(", "))
