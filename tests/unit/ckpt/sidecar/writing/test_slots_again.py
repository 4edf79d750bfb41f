"""Slots that are written again: the writer learns what lies there and tells what stayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.blocks import make_world
from sidecar_group import SidecarGroup, sidecar_group

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.memory.maps import SlotMaps
from holdfast.ckpt.memory.records import SnapshotWorld
from holdfast.ckpt.native import sums
from holdfast.ckpt.native.sums import SUM_BYTES
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.snapshot.settings import CopySettings
from holdfast.ckpt.snapshot.snapshotter import Snapshotter
from holdfast.ckpt.state.capture import gather_alone

RUNS = 12


@pytest.fixture
def one(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", threads=True) as group:
        yield group


def adopt(group: SidecarGroup, *, ranks: int = 1) -> tuple[SidecarClient, SnapshotWorld]:
    client = group.clients["a"]
    world = make_world(
        group.addresses(), run=group.run, rank_nodes=("a",) * ranks, generation=1, keep=1
    )
    client.adopt(world, restore=None)
    return client, world


def snapshotter(client: SidecarClient, world: SnapshotWorld, *, rank: int = 0) -> Snapshotter:
    return Snapshotter(
        client,
        run=world.run,
        generation=world.generation,
        rank=rank,
        world_size=1,
        gather=gather_alone,
        maps=SlotMaps(),
        copying=CopySettings(paced=False),
    )


def take(taking: Snapshotter, client: SidecarClient, buffer: torch.Tensor, step: int) -> int:
    """Take a snapshot and wait until it is protected; return the bytes copied."""
    before = taking.stats.bytes
    taking.snapshot({"buffer": buffer}, step)
    taking.fence()
    assert client.protected_step(generation=1, at_least=step, timeout_s=30) == step
    return taking.stats.bytes - before


def test_a_grant_names_the_block_that_was_written_there_last(one: SidecarGroup) -> None:
    client, _ = adopt(one, ranks=2)

    def granted(step: int, rank: int) -> tuple[str, Any]:
        grant = client.acquire(generation=1, step=step, rank=rank, size_bytes=70_000, timeout_s=10)
        return grant.path, (grant.before, client.abandon(grant.slot_id))[0]

    path, before = granted(1, 0)
    assert before is None
    assert granted(2, 0) == (path, (1, 1, 0))
    assert granted(3, 1) == (path, (1, 2, 0))
    assert granted(4, 0) == (path, (1, 3, 1))


def test_a_rank_gets_the_slots_that_it_wrote_before(one: SidecarGroup) -> None:
    client, _ = adopt(one, ranks=2)
    grants = [
        client.acquire(generation=1, step=1, rank=rank, size_bytes=70_000, timeout_s=10)
        for rank in range(2)
    ]
    for grant in grants:
        client.abandon(grant.slot_id)
    for rank in (1, 0):
        again = client.acquire(generation=1, step=2, rank=rank, size_bytes=70_000, timeout_s=10)
        assert again.path == grants[rank].path
        assert again.before == (1, 1, rank)


def test_only_what_changed_is_written_and_compared(
    one: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, world = adopt(one)
    taking = snapshotter(client, world)
    buffer = torch.zeros(RUNS, SUM_BYTES // 4)
    copied = []
    for step in range(1, 10):
        buffer[step % RUNS] += 1
        copied.append(take(taking, client, buffer, step))
    assert copied[-1] <= 2 * SUM_BYTES
    compared: list[int] = []
    equal = sums._equal

    def noted(here: int, there: int, lo: int, hi: int) -> bool:
        compared.append(hi - lo)
        return equal(here, there, lo, hi)

    monkeypatch.setattr(sums, "_equal", noted)
    client.follow(world, 9, 0)
    buffer[3] += 1
    take(taking, client, buffer, 10)
    changed = client.changed(world, 10, 0, base=(1, 9))
    assert changed is not None
    assert (3 * SUM_BYTES, SUM_BYTES) in changed
    assert sum(nbytes for _, nbytes in changed) <= 2 * SUM_BYTES
    assert sum(compared) <= SUM_BYTES
    taking.close()


@pytest.mark.parametrize("since", [np.zeros(3, np.int64), np.full(RUNS + 1, 2, np.int64)])
def test_steps_that_cannot_be_are_refused(
    one: SidecarGroup, monkeypatch: pytest.MonkeyPatch, since: Any
) -> None:
    client, world = adopt(one)
    taking = snapshotter(client, world)
    seal = client.seal
    refused = []

    def lying(**given: Any) -> None:
        try:
            seal(**given | {"since": since})
        except CorruptError as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(client, "seal", lying)
    taking.snapshot({"buffer": torch.zeros(RUNS, SUM_BYTES // 4)}, 1)
    taking.fence()
    assert "eight for each are needed, none later than the step" in refused[0]
    taking.close()
