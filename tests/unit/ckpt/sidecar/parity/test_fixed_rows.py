"""The parity of fixed parts is made once, and is right whatever comes after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.blocks import random_payload, write_payload
from rows import MIB, WAYS, check_rows, counted, flip, rebuilt, send_over_the_wire
from sidecar_group import SidecarGroup, sidecar_group

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.memory.arena import FixedPart
from holdfast.ckpt.memory.records import SnapshotWorld
from holdfast.ckpt.parity.stripes import Geometry

MOVING = 300_000


@pytest.fixture
def three(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", "c", threads=True) as group:
        yield group


class Ranks:
    """Ranks that write blocks with fixed parts; the rank ``r`` has ``r + 1`` MiB of it."""

    def __init__(self, group: SidecarGroup, world: SnapshotWorld) -> None:
        self.group, self.world = group, world
        self.numbers = dict.fromkeys(range(len(world.rank_nodes)), 1)
        self.payloads: dict[int, bytes] = {}

    def part(self, rank: int) -> FixedPart:
        number, nbytes = self.numbers[rank], (rank + 1) * MIB
        return FixedPart(generation=1, rank=rank, number=number, nbytes=nbytes)

    def payload(self, step: int, rank: int) -> bytes:
        part = self.part(rank)
        fixed = random_payload(part.nbytes, seed=(0, rank, part.number))
        return fixed + random_payload(MOVING, seed=(step, rank))

    def write(self, step: int) -> None:
        for rank, node in enumerate(self.world.rank_nodes):
            self.payloads[rank] = self.payload(step, rank)
            write_payload(
                self.group.clients[node],
                self.world,
                self.payloads[rank],
                step=step,
                rank=rank,
                fixed=self.part(rank),
            )
        self.group.await_protected(self.world, step)
        check_rows(self.group, self.world, step)


def moved(group: SidecarGroup) -> int:
    return counted(group, "fragment_bytes_sent") + counted(group, "fragment_bytes_mapped")


@WAYS
@pytest.mark.parametrize(("parity", "columns"), [(1, 0), (1, 1), (2, 0)])
def test_the_parity_of_fixed_parts_is_made_once(
    three: SidecarGroup, by_wire: bool, parity: int, columns: int
) -> None:
    if by_wire:
        send_over_the_wire(three)
    world = three.adopt(rank_nodes=("a", "a", "b", "c"), parity=parity, columns=columns, keep=1)
    ranks = Ranks(three, world)
    ranks.write(1)
    first, before = moved(three), [three.sidecars[node].parities.nbytes() for node in "abc"]
    for step in (2, 3, 4, 5):
        ranks.write(step)
    assert moved(three) - first <= 4 * parity * 4 * (MOVING + (1 << 17))
    for node, nbytes in zip("abc", before, strict=True):
        sidecar = three.sidecars[node]
        assert sidecar.parities.nbytes() <= nbytes + 6 * (MOVING + (1 << 18))
        own = sum((rank + 1) * MIB for rank, at in enumerate(world.rank_nodes) if at == node)
        slots = 3 * world.rank_nodes.count(node)
        assert sidecar.room.slot_bytes() <= own + slots * (MOVING + (1 << 17))
    lost = {rank: ranks.payloads[rank] for rank in (0, 1)}
    assert rebuilt(three, world, 5, "a") == lost


@WAYS
def test_rows_follow_a_new_fixed_part(three: SidecarGroup, by_wire: bool) -> None:
    if by_wire:
        send_over_the_wire(three)
    ranks = Ranks(three, three.adopt(keep=1))
    ranks.write(1)
    ranks.write(2)
    ranks.numbers[1] += 1
    ranks.write(3)
    ranks.write(4)
    assert len(list(three.sidecars["b"].core.arena.directory.glob("*.slot-fixed"))) == 1
    assert rebuilt(three, ranks.world, 4, "b") == {1: ranks.payloads[1]}


def test_a_damaged_fixed_part_of_a_row_is_found_and_made_again(three: SidecarGroup) -> None:
    ranks = Ranks(three, three.adopt(keep=1))
    ranks.write(1)
    directory = three.sidecars["a"].core.arena.directory
    (damaged,) = directory.glob("*.row-fixed")
    flip(damaged, 2 * (1 << 17) + 5)
    ranks.write(258)  # looks at the third run
    assert damaged.name not in {path.name for path in directory.glob("*.row-fixed")} or (
        len(list(directory.glob("*.row-fixed"))) == 2
    )
    assert rebuilt(three, ranks.world, 258, "b") == {1: ranks.payloads[1]}


def test_a_damaged_fixed_part_of_a_block_is_found_at_a_seal(three: SidecarGroup) -> None:
    ranks = Ranks(three, three.adopt(keep=1))
    ranks.write(1)
    (part,) = three.sidecars["a"].core.arena.directory.glob("*.slot-fixed")
    flip(part, 5)
    with pytest.raises(CorruptError):
        ranks.write(256)


def test_a_damaged_fixed_part_of_a_block_is_made_good_by_parity(three: SidecarGroup) -> None:
    ranks = Ranks(three, three.adopt(keep=1))
    ranks.write(1)
    (part,) = three.sidecars["a"].core.arena.directory.glob("*.slot-fixed")
    flip(part, 5)
    assert three.clients["b"].distrust(ranks.world, 1, 1) is False
    assert three.clients["a"].distrust(ranks.world, 1, 0) is True
    assert rebuilt(three, ranks.world, 1, "a") == {0: ranks.payloads[0]}


def test_a_row_of_an_older_fixed_part_is_found(
    three: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Geometry.fixed_parts

    def without_numbers(self: Geometry, stripe: int) -> tuple[tuple[int, int, int], ...]:
        return tuple((rank, 0, nbytes) for rank, _, nbytes in real(self, stripe))

    monkeypatch.setattr(Geometry, "fixed_parts", without_numbers)
    ranks = Ranks(three, three.adopt(keep=1))
    ranks.write(1)
    ranks.numbers[1] += 1
    with pytest.raises(AssertionError):
        ranks.write(2)
