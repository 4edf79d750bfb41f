"""A row of one column is a copy of the column, made and verified in one pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.blocks import random_payload, write_payload
from rows import MIB, check_rows, counted, flip, rebuilt, write
from sidecar_group import SidecarGroup, sidecar_group, wait_until

from holdfast.ckpt.memory.fixed_files import HEADER_BYTES
from holdfast.ckpt.sidecar.parity import builder, row_build
from holdfast.ckpt.sidecar.parity.copied_rows import Mirroring


@pytest.fixture
def two(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", "b", threads=True) as group:
        yield group


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Return how rows were made."""
    found: list[type] = []
    choose = builder._encoding

    def noted(*arguments: object) -> object:
        encoding = choose(*arguments)  # type: ignore[arg-type]
        found.append(type(encoding))
        return encoding

    monkeypatch.setattr(builder, "_encoding", noted)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_copies_whatever_the_blocks_are(
    two: SidecarGroup, made: list[type], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Several blocks with gaps between them, and rows longer than the column, cut anywhere."""
    rng = random.Random(seed)
    monkeypatch.setattr(row_build, "WINDOW_BYTES", rng.choice((4096, 131_072, 200_704, 4 * MIB)))
    world = two.adopt(rank_nodes=rng.choice((("a", "a", "b"), ("a", "b", "a", "b"))), parity=1)
    sizes = (1, 5, 130_000, 131_072, 262_144, 700_001, MIB + 17)
    for step in (1, 2, 3):  # later ones into rows that hold other bytes
        payloads = {
            rank: random_payload(rng.choice(sizes), seed=(seed, step, rank))
            for rank in range(len(world.rank_nodes))
        }
        write(two, world, step, payloads)
        two.await_protected(world, step)
        check_rows(two, world, step)
    assert set(made) == {Mirroring}
    assert counted(two, "fragment_bytes_sent") == 0
    lost = {rank for rank, node in enumerate(world.rank_nodes) if node == "a"}
    assert rebuilt(two, world, 3, "a") == {rank: payloads[rank] for rank in lost}


@pytest.mark.parametrize("at", [10, 500_000, MIB - 1])
def test_bytes_that_changed_since_the_seal_are_said_and_not_sealed(
    two: SidecarGroup, made: list[type], at: int
) -> None:
    world = two.adopt(parity=1)
    payloads = {rank: random_payload(MIB, seed=(rank,)) for rank in range(2)}
    write_payload(two.clients["b"], world, payloads[1], step=1, rank=1)
    slot = two.sidecars["b"].core.slots.holding((1, 1, 1))
    assert slot is not None
    flip(slot.file.path, HEADER_BYTES + at)
    write_payload(two.clients["a"], world, payloads[0], step=1, rank=0)
    wait_until(lambda: bool(two.clients["a"].status()["unprotected"]), "a says why")
    (why,) = two.clients["a"].status()["unprotected"].values()
    assert "rank 1" in why and "node b" in why
    assert two.clients["a"].protected_step(generation=1) == -1
    write(two, world, 2, payloads)
    two.await_protected(world, 2)
    check_rows(two, world, 2)
    assert set(made) == {Mirroring}


def test_a_column_that_moved_is_had_over_the_wire(
    two: SidecarGroup, made: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[int, int] = {}
    current = builder.MappedColumn.is_current

    def once(self: builder.MappedColumn) -> bool:
        calls[id(self)] = calls.get(id(self), 0) + 1
        return calls[id(self)] == 1 and current(self)

    monkeypatch.setattr(builder.MappedColumn, "is_current", once)
    world = two.adopt(parity=1)
    write(two, world, 1, {rank: random_payload(200_000, seed=(rank,)) for rank in range(2)})
    two.await_protected(world, 1)
    check_rows(two, world, 1)
    assert set(made) == {Mirroring}
    assert counted(two, "fragment_bytes_sent") > 0
