"""What sidecars spill to their disks is there for the next ones, of this run or another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sidecar_group import SidecarGroup, sidecar_group, wait_until, write_step

from ckpt.arena import SlotFile
from ckpt.target import DiskTarget
from ckpt.testing.blocks import write_block
from ckpt.world import RestorePoint
from elastic.records import Origin
from elastic.spilled import choose

NODES = ("a", "b", "c")
SIZES = (5000, 70_001, 300)


@pytest.fixture
def disk(tmp_path: Path) -> DiskTarget:
    return DiskTarget(directory=str(tmp_path / "disk"), every=2)


@pytest.fixture
def spilled(tmp_path: Path, disk: DiskTarget) -> Iterator[dict[int, dict[int, bytes]]]:
    """A run that has spilled steps 2 and 4 and is gone, with the payloads of all its steps."""
    (tmp_path / "earlier").mkdir()
    with sidecar_group(tmp_path / "earlier", *NODES, threads=True) as group:
        world = group.adopt()
        for client in group.clients.values():
            client.spill(disk)
        payloads = {}
        for step in range(1, 6):
            payloads[step] = write_step(group, world, step, sizes=SIZES)
            if step % 2 == 0:
                for client in group.clients.values():
                    wait_until(lambda: client.status()["spilled"][-1:] == [step], "it is spilled")  # noqa: B023
        assert all(client.status()["bytes"]["disk"] for client in group.clients.values())
    yield payloads


def offered(group: SidecarGroup, disk: DiskTarget) -> list[RestorePoint]:
    offers = {node: client.spilled(disk) for node, client in group.clients.items()}
    return choose(offers, run=group.run, timeline=(), least=-1)


def test_a_later_run_reads_what_was_spilled(
    tmp_path: Path, disk: DiskTarget, spilled: dict[int, dict[int, bytes]]
) -> None:
    with sidecar_group(tmp_path, *NODES, threads=True) as group:
        world = group.adopt()
        points = offered(group, disk)
        assert [point.step for point in points] == [4, 2]
        assert offered(group, disk) == points
        for source in points[0].sources:
            client, payload = group.clients[source.node], spilled[4][source.rank]
            handle = client.open_block(points[0].world, 4, source)
            assert handle.on_disk
            slot = SlotFile.open(handle.path)
            assert bytes(slot.block(handle.payload_bytes)) == payload
            (part,) = client.read(points[0].world, 4, source.rank, [(0, SIZES[source.rank])])
            assert part == payload
        files = sorted(Path(disk.directory).rglob("*.slot"))
        for step in (4, 5):  # what the new generation protects supersedes the offer
            write_step(group, world, step, sizes=SIZES)
        for sidecar in group.sidecars.values():
            assert not any(slot.borrowed for slot in sidecar.core.slots.all())
        assert sorted(Path(disk.directory).rglob("*.slot")) == files


def test_a_damaged_block_leaves_the_step_before(
    tmp_path: Path, disk: DiskTarget, spilled: dict[int, dict[int, bytes]]
) -> None:
    newest = sorted(Path(disk.directory, "b").glob("*.slot"))[-1]
    with newest.open("r+b") as file:
        file.seek(4096 + 100)
        byte = file.read(1)
        file.seek(4096 + 100)
        file.write(bytes([byte[0] ^ 1]))
    with sidecar_group(tmp_path, *NODES, threads=True) as group:
        group.adopt()
        assert [point.step for point in offered(group, disk)] == [2]
        assert group.clients["b"].status()["counters"]["corrupt_spills"] == 1


def test_a_missing_node_leaves_nothing_to_restore(
    tmp_path: Path, disk: DiskTarget, spilled: dict[int, dict[int, bytes]]
) -> None:
    with sidecar_group(tmp_path, "a", "b", threads=True) as group:
        group.adopt()
        assert offered(group, disk) == []


def test_futures_that_were_rolled_back_and_steps_before_a_checkpoint_are_left_out(
    tmp_path: Path, disk: DiskTarget, spilled: dict[int, dict[int, bytes]]
) -> None:
    with sidecar_group(tmp_path, *NODES, threads=True) as group:
        group.adopt()
        offers = {node: client.spilled(disk) for node, client in group.clients.items()}
        run = offers["a"][0].run
        rolled_back = (Origin(generation=2, step=3),)

        def steps(run: str, timeline: tuple[Origin, ...], least: int) -> list[int]:
            points = choose(offers, run=run, timeline=timeline, least=least)
            return [point.step for point in points]

        assert steps(run, rolled_back, -1) == [2]
        assert steps("another", rolled_back, -1) == [4, 2]
        assert steps("another", (), 3) == [4]
        assert steps("another", (), 5) == []


def test_a_disk_that_refuses_hurts_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with sidecar_group(tmp_path, "a", threads=True) as group:
        world, client = group.adopt(), group.clients["a"]
        client.spill(DiskTarget(directory=str(tmp_path / "file"), every=1))
        for step in (1, 2, 3):
            write_block(client, world, step=step, rank=0, nbytes=1000)
            group.await_protected(world, step)
        wait_until(lambda: bool(client.status()["spill_error"]), "the error is told")
        assert "choose another disk" in client.status()["spill_error"]
