"""A sidecar respects its node's lease, and keeps its port."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.blocks import make_block
from sidecar_group import SidecarGroup, sidecar_group, write_step

from holdfast.ckpt.errors import FencedError
from holdfast.ckpt.memory.arena import arena_path
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.sidecar.config import SidecarConfig
from holdfast.ckpt.sidecar.core.lease_page import LeasePage
from holdfast.ckpt.sidecar.server import Sidecar

LONG_NS = 3600 * 10**9


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, threads=True) as group:
        yield group


def start(group: SidecarGroup, *, lease_fd: int = -1, port: int = 0) -> SidecarClient:
    """Start the sidecar of node a."""
    config = SidecarConfig(
        run=group.run,
        node="a",
        key_file=str(group.key_file),
        arena_dir=str(arena_path(group.run, "a")),
        lease_fd=lease_fd,
        port=port,
    )
    group.sidecars["a"] = Sidecar(config, group.key)
    group.clients["a"] = SidecarClient(group.addresses()["a"], group.key)
    return group.clients["a"]


def test_past_the_nodes_lease_nothing_is_granted_or_sealed(group: SidecarGroup) -> None:
    page = LeasePage.create("test")
    client = start(group, lease_fd=os.dup(page.fd))
    world = group.adopt(keep=1)
    write_step(group, world, 1, sizes=(1000,))  # nothing was said yet: no limit
    page.extend(time.monotonic_ns() + LONG_NS)
    write_step(group, world, 2, sizes=(1000,))
    grant = client.acquire(generation=1, step=3, rank=0, size_bytes=5000, timeout_s=5)
    page.extend(time.monotonic_ns() - 1)
    entry, _ = make_block(b"late", step=3)
    with pytest.raises(FencedError, match="the lease of node a ran out in generation 1"):
        client.seal(slot_id=grant.slot_id, entry=entry)
    with pytest.raises(FencedError, match="the lease of node a ran out"):
        client.acquire(generation=1, step=4, rank=0, size_bytes=5000, timeout_s=5)
    assert client.protected_step(generation=1) == 2, "what is there can still be read"
    page.extend(time.monotonic_ns() + LONG_NS)
    world = group.adopt(generation=2, keep=1)
    write_step(group, world, 3, sizes=(1000,))


def test_a_successor_serves_where_its_predecessor_did_unless_that_is_taken(
    tmp_path: Path, group: SidecarGroup
) -> None:
    address = start(group).address
    port = int(address.rpartition(":")[2])
    group.kill("a", wipe=False)
    assert start(group, port=port).address == address
    (tmp_path / "others").mkdir()
    with sidecar_group(tmp_path / "others", threads=True) as others:
        assert start(others, port=port).address != address
