"""Prefetched parts belong to the step that they claim, under any changes and missed steps."""

from __future__ import annotations

from collections.abc import Sequence

from doubles.blocks import make_world
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.memory.records import BlockSource, RestorePoint, SnapshotWorld
from holdfast.ckpt.recovery.prefetched import Ahead, Range, StepKey, fetch

WORLD = make_world({"a": "tcp://127.0.0.1:1"}, run="r", rank_nodes=("a",), parity=0)
LENGTH = 24
PARTS = [(0, 5), (5, 3), (10, 8), (20, 4)]


class Holder:
    """Keeps the two newest steps; comparing is by runs of four bytes."""

    def __init__(self, first: bytes) -> None:
        self.kept = {0: first}

    def add(self, step: int, block: bytes) -> None:
        self.kept[step] = block
        for old in sorted(self.kept)[:-2]:
            del self.kept[old]

    def read(
        self, world: SnapshotWorld, step: int, rank: int, ranges: Sequence[Range]
    ) -> list[memoryview]:
        if step not in self.kept:
            raise NotFoundError("released")
        return [memoryview(self.kept[step][at : at + nbytes]) for at, nbytes in ranges]

    def follow(self, world: SnapshotWorld, step: int, rank: int) -> None:
        if step not in self.kept:
            raise NotFoundError("released")

    def changed(
        self, world: SnapshotWorld, step: int, rank: int, *, base: StepKey
    ) -> tuple[Range, ...] | None:
        if step not in self.kept:
            raise NotFoundError("released")
        if base[1] not in self.kept:
            return None
        new, old = self.kept[step], self.kept[base[1]]
        runs = range(0, LENGTH, 4)
        return tuple((at, 4) for at in runs if new[at : at + 4] != old[at : at + 4])


edits = st.lists(st.tuples(st.integers(0, LENGTH - 1), st.integers(0, 2)), max_size=3)


@given(st.lists(st.tuples(edits, st.integers(0, 5)), max_size=8))
@settings(max_examples=examples(200), deadline=None)
def test_a_part_has_the_bytes_of_the_step_it_is_said_to_be_of(
    history: list[tuple[list[tuple[int, int]], int]],
) -> None:
    block = bytes(LENGTH)
    blocks, holder, ahead = {0: block}, Holder(block), Ahead({0: PARTS})
    for step, (changes, requests) in enumerate(history, start=1):
        edited = bytearray(block)
        for at, value in changes:
            edited[at] = value
        block = blocks[step] = bytes(edited)
        holder.add(step, block)
        point = RestorePoint(world=WORLD, step=step, sources=(BlockSource(rank=0, node="a"),))
        passes = fetch(ahead, point, lambda node: holder)
        for _ in range(requests):  # none: this step is missed
            if next(passes, None) is None:
                break
        for old, saved in blocks.items():
            key = (WORLD.generation, old)
            fresh = set(PARTS) - set(ahead.stale(key, 0))
            for at, nbytes in fresh:
                part = ahead._parts[0][at].room
                assert bytes(part) == saved[at : at + nbytes]
        if requests == 5:
            assert ahead.held_bytes((WORLD.generation, step)) == ahead.nbytes
