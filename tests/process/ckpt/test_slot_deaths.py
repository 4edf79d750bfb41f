"""A sidecar killed at any point of a slot's life leaves the old state or the new one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.blocks import random_payload, write_block
from sidecar_group import DEADLINE_S, SidecarGroup, inventories, sidecar_group, wait_until
from stop_points import stopping_at

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.memory.block import SlotState
from holdfast.ckpt.memory.records import SnapshotWorld
from holdfast.ckpt.parity.stripes import restore_points
from holdfast.ckpt.sidecar.client import SidecarClient

STEPS = 6
GROWS_AT = 4
POINTS = (
    *(f"create.{at}:{n}" for at in ("before", "made", "after") for n in (2, 3)),
    *(f"acquire.{at}:3" for at in ("before", "after")),
    *(f"seal.{at}:3" for at in ("before", "after")),
    *(f"commit.{at}:3" for at in ("before", "after")),
    *(f"release.{at}:1" for at in ("before", "after")),
    *(f"discard.{at}:1" for at in ("before", "after")),
)


def nbytes_of(step: int) -> int:
    """The state grows once, so that slots which have become too small are discarded."""
    return 30_000 if step < GROWS_AT else 200_000


class Writer(threading.Thread):
    """Writes step after step until the sidecar ends; ``protected`` is the sidecar's last answer."""

    def __init__(self, address: str, group: SidecarGroup, world: SnapshotWorld) -> None:
        super().__init__(daemon=True)
        self._client = SidecarClient(address, group.key, timeout_s=DEADLINE_S)
        self._world = world
        self.protected = 0

    def run(self) -> None:
        with contextlib.suppress(CkptError):
            for step in range(1, STEPS + 1):
                write_block(self._client, self._world, step=step, rank=0, nbytes=nbytes_of(step))
                self.protected = self._client.protected_step(
                    generation=1, at_least=step, timeout_s=DEADLINE_S
                )
        self._client.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path) as group:
        yield group


@pytest.mark.parametrize("point", POINTS)
def test_a_sidecar_killed_there_costs_no_protected_step(group: SidecarGroup, point: str) -> None:
    with stopping_at(point):
        group.start("a")
    process = group.processes["a"]
    writer = Writer(process.address, group, group.adopt())
    writer.start()
    flags = os.WSTOPPED | os.WNOHANG
    wait_until(lambda: os.waitid(os.P_PID, process.pid, flags) is not None, "it stops there")
    os.kill(process.pid, signal.SIGKILL)
    writer.join(DEADLINE_S)
    group.kill("a", wipe=False)
    group.start("a")

    points, _ = restore_points(inventories(group))
    newest = max((each.step for each in points), default=0)
    assert writer.protected <= newest <= writer.protected + 1, "nothing is lost, nothing made up"
    slots = group.clients["a"].status()["slots"]
    assert slots[SlotState.WRITING.name.lower()] == 0
    files = list(process.arena_dir.glob("*.slot"))
    assert len(files) == sum(slots.values()), "no file is left that nobody knows of"
    for each in points:
        (part,) = group.clients["a"].read(each.world, each.step, 0, [(0, nbytes_of(each.step))])
        assert part == random_payload(nbytes_of(each.step), seed=(1, each.step, 0))
    world = group.adopt(generation=2, restore=points[0] if points else None)
    write_block(group.clients["a"], world, step=newest + 1, rank=0, nbytes=10_000)
    group.await_protected(world, newest + 1)
