"""Blocks are looked at from when their generation is fenced, once, and no look is too old."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sidecar_group import SidecarGroup, inventories, sidecar_group, write_step

from ckpt.arena import SlotFile
from ckpt.sidecar import scrutiny
from ckpt.sidecar.slots import Slot
from ckpt.testing.blocks import INDEX_ROOM_BYTES, make_index, random_payload

SIZES = (40_000, 9_000)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[SidecarGroup]:
    with sidecar_group(tmp_path, "a", threads=True) as group:
        yield group


class Looks:
    """Counts looks, and lets them be waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._look, self._changed = scrutiny.is_intact, threading.Condition()
        self.ranks: list[int] = []
        monkeypatch.setattr(scrutiny, "is_intact", self)

    def __call__(self, slot: Slot) -> bool:
        found = self._look(slot)
        with self._changed:
            self.ranks.append(slot.entry.rank if slot.entry else -1)
            self._changed.notify_all()
        return found

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ranks) >= count, timeout=30)


def test_an_inventory_takes_the_word_of_looks_that_the_fence_began(
    one: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrutiny, "_FRESH_S", 600.0)
    looks, world = Looks(monkeypatch), one.adopt(rank_nodes=("a", "a"), keep=1)
    write_step(one, world, 1, sizes=SIZES)
    one.clients["a"].fence(1)
    looks.wait_for(2)
    (found,) = inventories(one)
    assert sorted(entry.rank for entry in found.blocks) == sorted(looks.ranks) == [0, 1]


def test_what_is_sealed_after_the_fence_is_looked_at_for_the_inventory(
    one: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrutiny, "_FRESH_S", 600.0)
    looks, world = Looks(monkeypatch), one.adopt(rank_nodes=("a", "a"), keep=1)
    client = one.clients["a"]
    write_step(one, world, 1, sizes=SIZES)
    payload = random_payload(SIZES[1], seed=(1, 2, 1))
    grant = client.acquire(
        generation=1, step=2, rank=1, size_bytes=len(payload) + INDEX_ROOM_BYTES, timeout_s=5
    )
    client.fence(1)
    looks.wait_for(2)
    slot = SlotFile.open(grant.path)
    slot.block(len(payload))[:] = payload
    index = make_index(payload, run=world.run, generation=1, step=2, rank=1, world_size=2)
    client.seal(slot_id=grant.slot_id, entry=slot.finish(index))
    slot.close()
    (found,) = inventories(one)
    assert len(found.blocks) == 3
    assert looks.ranks[2:] == [1]


def test_a_look_that_ended_long_ago_is_taken_again(
    one: SidecarGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrutiny, "_FRESH_S", -1.0)
    looks, world = Looks(monkeypatch), one.adopt(rank_nodes=("a", "a"), keep=1)
    write_step(one, world, 1, sizes=SIZES)
    inventories(one)
    before = len(looks.ranks)
    inventories(one)
    assert sorted(looks.ranks[before:]) == [0, 1]
