"""Snapshots spilled to a sidecar's disk are available to later sidecars, of this run or another."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
from doubles.blocks import write_block
from sidecar_group import SidecarGroup, sidecar_group, wait_until, write_step

from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.memory.records import RestorePoint
from holdfast.ckpt.memory.target import DiskTarget
from holdfast.ckpt.sidecar.disk.directory import SpillDirectory, SpilledHoldings
from holdfast.elastic.membership.records import Origin
from holdfast.elastic.tracked.sources.spilled import Choice, choose

NODES = ("a", "b", "c")
SIZES = (5000, 70_001, 300)
Payloads: TypeAlias = dict[int, bytes]


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
    return list(choice(group, disk).points)


def choice(group: SidecarGroup, disk: DiskTarget) -> Choice:
    offers = {node: client.spilled(disk) for node, client in group.clients.items()}
    return choose(offers, run=group.run, timeline=(), least=-1)


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096 + 100)
        byte = file.read(1)
        file.seek(4096 + 100)
        file.write(bytes([byte[0] ^ 1]))


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
        files = {path: path.read_bytes() for path in spilled_files(disk)}
        for step in (4, 5):  # what the new generation protects supersedes the offer
            write_step(group, world, step, sizes=SIZES)
        for sidecar in group.sidecars.values():
            assert not any(slot.borrowed for slot in sidecar.core.slots.all())
            for row in sidecar.parities.sealed():
                assert row.file is None or not row.file.borrowed
        assert {path: path.read_bytes() for path in spilled_files(disk)} == files


def spilled_files(disk: DiskTarget) -> list[Path]:
    return sorted(path for path in Path(disk.directory).rglob("*") if path.is_file())


def test_a_damaged_block_is_rebuilt_from_the_rows(
    tmp_path: Path, disk: DiskTarget, spilled: dict[int, dict[int, bytes]]
) -> None:
    damage(sorted(Path(disk.directory, "b").glob("*.slot"))[-1])
    with sidecar_group(tmp_path, *NODES, threads=True) as group:
        group.adopt()
        point, _ = offered(group, disk)
        assert point.step == 4
        assert restored(group, point) == spilled[4]
        assert group.clients["b"].status()["counters"]["corrupt_spills"] == 1


def test_a_damaged_block_and_a_damaged_row_leave_the_step_before(
    tmp_path: Path, disk: DiskTarget, spilled: dict[int, dict[int, bytes]]
) -> None:
    damage(sorted(Path(disk.directory, "b").glob("*.slot"))[-1])
    for node in ("a", "c"):
        damage(sorted(Path(disk.directory, node).glob("*.row"))[-1])
    with sidecar_group(tmp_path, *NODES, threads=True) as group:
        group.adopt()
        found = choice(group, disk)
        assert [point.step for point in found.points] == [2]
        assert found.refused == 4
        assert "step 4 cannot be restored: the block of rank 1 (node b) is gone" in found.reason


def restored(group: SidecarGroup, point: RestorePoint) -> dict[int, bytes]:
    """Return the payloads that a restore point brings, rebuilt where that is needed."""
    found = {}
    for source in point.sources:
        client = group.clients[source.node]
        handle = client.open_block(point.world, point.step, source)
        ranges = [(0, handle.payload_bytes)]
        found[source.rank] = bytes(client.read(point.world, point.step, source.rank, ranges)[0])
    return found


def spill_once(directory: Path, disk: DiskTarget, nodes: tuple[str, ...], parity: int) -> Payloads:
    """Have a run spill step 2 and end; return the payloads."""
    directory.mkdir()
    with sidecar_group(directory, *nodes, threads=True) as group:
        world = group.adopt(parity=parity)
        for client in group.clients.values():
            client.spill(disk)
        sizes = [5000 * (rank + 1) + rank for rank in range(len(nodes))]
        payloads = write_step(group, world, 2, sizes=sizes)
        for client in group.clients.values():
            wait_until(lambda: client.status()["spilled"] == [2], "it is spilled")  # noqa: B023
    return payloads


@pytest.mark.parametrize(("nodes", "parity"), [("abc", 1), ("abcd", 2), ("abcde", 1)])
def test_with_up_to_m_disks_gone_every_bit_comes_back_and_with_more_the_lost_are_named(
    tmp_path: Path, disk: DiskTarget, nodes: str, parity: int
) -> None:
    payloads = spill_once(tmp_path / "earlier", disk, tuple(nodes), parity)
    for gone in range(parity + 2):
        for lost in itertools.combinations(nodes, gone):
            left = tuple(node for node in nodes if node not in lost)
            if not left:
                continue
            (tmp_path / "".join(left)).mkdir()
            with sidecar_group(tmp_path / "".join(left), *left, threads=True) as group:
                group.adopt(parity=0)
                found = choice(group, disk)
                if gone > parity:
                    assert found.points == ()
                    assert found.refused == 2
                    named = found.reason.partition("those of nodes ")[2].removesuffix(
                        " are missing"
                    )
                    assert set(named.split(", ")) <= set(lost)
                    assert len(named.split(", ")) > parity
                    continue
                (point,) = found.points
                assert restored(group, point) == payloads
                assert sum(source.rebuilt for source in point.sources) == gone


def test_a_lost_block_is_rebuilt_by_nodes_that_have_other_names(
    tmp_path: Path, disk: DiskTarget
) -> None:
    payloads = spill_once(tmp_path / "earlier", disk, ("a", "b", "c"), 1)
    Path(disk.directory, "a").rename(Path(disk.directory, "x"))
    Path(disk.directory, "b").rename(Path(disk.directory, "y"))
    with sidecar_group(tmp_path, "x", "y", "z", threads=True) as group:
        group.adopt()
        (point,) = offered(group, disk)
        assert restored(group, point) == payloads


def test_rows_that_are_released_while_they_are_spilled_keep_their_bytes(
    tmp_path: Path, disk: DiskTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, spilling = threading.Event(), threading.Event()
    write = SpillDirectory.write

    def slow(self: SpillDirectory, holdings: SpilledHoldings, **options: Any) -> Any:
        spilling.set()
        assert hold.wait(20)
        return write(self, holdings, **options)

    monkeypatch.setattr(SpillDirectory, "write", slow)
    (tmp_path / "earlier").mkdir()
    with sidecar_group(tmp_path / "earlier", *NODES, threads=True) as group:
        world = group.adopt(keep=1)
        for client in group.clients.values():
            client.spill(msgspec.structs.replace(disk, every=100))
        payloads = write_step(group, world, 100, sizes=SIZES)
        assert spilling.wait(20)
        for step in range(101, 106):  # rows and slots of step 100 would be used again
            write_step(group, world, step, sizes=SIZES)
        hold.set()
        for client in group.clients.values():
            wait_until(lambda: client.status()["spilled"] == [100], "it is spilled")  # noqa: B023
        for sidecar in group.sidecars.values():
            assert not any(row.pins for row in sidecar.parities.sealed())
        files = {len(sidecar.parities._kept_files()) for sidecar in group.sidecars.values()}
        assert files == {1}
    with sidecar_group(tmp_path, "a", "b", threads=True) as group:
        group.adopt()
        (point,) = offered(group, disk)
        assert restored(group, point) == payloads


def test_futures_that_were_rolled_back_and_steps_before_a_checkpoint_are_left_out(
    tmp_path: Path, disk: DiskTarget, spilled: dict[int, dict[int, bytes]]
) -> None:
    with sidecar_group(tmp_path, *NODES, threads=True) as group:
        group.adopt()
        offers = {node: client.spilled(disk) for node, client in group.clients.items()}
        run = offers["a"][0].run
        rolled_back = (Origin(generation=2, step=3),)

        def steps(run: str, timeline: tuple[Origin, ...], least: int) -> list[int]:
            found = choose(offers, run=run, timeline=timeline, least=least)
            return [point.step for point in found.points]

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
        assert "choose another place" in client.status()["spill_error"]
