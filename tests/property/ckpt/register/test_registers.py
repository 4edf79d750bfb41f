"""A register is the union of the writers' indexes, in parts too, and no changed byte passes."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from doubles.registers import Pieces, built, opened, writers_of
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format.manifest import Manifest, PackedChunk, PackIndex
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.register.records import Region, meet, region_of

Chunks = set[tuple[int, str, PackedChunk]]


@st.composite
def _cut_tensors(draw: st.DrawFn, *, world_size: int) -> Pieces:
    """Tensors cut at random places along each dim, each box at a random writer."""
    found = {}
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        spans = []
        for extent in shape:
            inner = st.integers(1, max(extent - 1, 1))
            cuts = sorted({0, extent, *draw(st.lists(inner, max_size=7))} - {extent + 1})
            cuts = [cut for cut in cuts if cut <= extent]
            spans.append([(a, b - a) for a, b in pairwise(cuts)])
        boxes = [
            Box(offset=tuple(a for a, _ in dims), shape=tuple(n for _, n in dims))
            for dims in product(*spans)
        ]
        boxes = [box for box in boxes if box.size]
        writer = st.integers(0, world_size - 1)
        name = draw(st.sampled_from(("model", "a", "zebra", "ä")))
        found[f"{name}.{number}"] = (shape, [(draw(writer), box) for box in boxes])
    return found


@st.composite
def _steps(draw: st.DrawFn) -> tuple[int, Pieces, dict[int, dict[str, object]]]:
    world_size = draw(st.integers(1, 9))
    owners = draw(st.sets(st.integers(0, world_size + 3)))
    values: dict[int, dict[str, object]] = {}
    for rank in owners:
        values.setdefault(rank % world_size, {})[f"rng@{rank}"] = {"state": [rank, "x" * rank]}
    return world_size, draw(_cut_tensors(world_size=world_size)), values


def chunks_of(packs: dict[int, PackIndex]) -> Chunks:
    return {
        (writer, fqn, chunk)
        for writer, index in packs.items()
        for fqn, tensor in index.tensors.items()
        for chunk in tensor.chunks
    }


@settings(max_examples=examples(60), deadline=None)
@given(step=_steps(), run_bytes=st.sampled_from((1, 2000, 1 << 30)))
def test_a_register_is_the_union_of_all_indexes(
    step: tuple[int, Pieces, dict[int, dict[str, object]]], run_bytes: int
) -> None:
    world_size, pieces, rank_values = step
    writers = writers_of(
        pieces,
        world_size=world_size,
        values={"lr": 0.1},
        rank_values=rank_values,
        aliases={"tied": next(iter(pieces))},
    )
    manifest, data = built(writers, run_bytes=run_bytes)
    register = opened(manifest, data)
    register.check()
    packs = register.packs(None)
    assert chunks_of(packs) == chunks_of({record.writer: index for record, index in writers})
    assert [*register.writers().values()] == [record for record, _ in writers]
    assert {fqn for index in packs.values() for fqn in index.tensors} == set(pieces)
    assert [packs[w].rank_values for w in range(world_size)] == [i.rank_values for _, i in writers]
    assert (manifest.values, manifest.aliases) == (writers[0][1].values, writers[0][1].aliases)
    listed = {rank for low, high in register.ranks.get("rng", ()) for rank in range(low, high)}
    assert listed == {int(name[4:]) for own in rank_values.values() for name in own}
    for rank in listed:
        (found,) = register.trees("rng", [rank]).values()
        assert found.tree == {"state": [rank, "x" * rank]}


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_a_part_has_the_chunks_that_meet_the_wanted_boxes(data: st.DataObject) -> None:
    world_size, pieces, _ = data.draw(_steps())
    writers = writers_of(pieces, world_size=world_size)
    register = opened(*built(writers))
    every = chunks_of({record.writer: index for record, index in writers})
    names = data.draw(st.sets(st.sampled_from(sorted(pieces))))
    want: dict[str, list[Region] | None] = {}
    for fqn in names:
        shape = pieces[fqn][0]
        low = tuple(data.draw(st.integers(0, n)) for n in shape)
        high = tuple(data.draw(st.integers(a, n)) for a, n in zip(low, shape, strict=True))
        want[fqn] = None if data.draw(st.booleans()) else [(low, high)]
    wanted = {
        (writer, fqn, chunk)
        for writer, fqn, chunk in every
        if fqn in want
        and (
            (regions := want[fqn]) is None
            or any(meet(*region_of(chunk.box), region) for region in regions)
        )
    }
    assert chunks_of(register.packs(want)) == wanted


def small_step() -> tuple[Manifest, bytes]:
    pieces: Pieces = {
        f"layer.{n}": ((8,), [(w, Box(offset=(w * 2,), shape=(2,))) for w in range(4)])
        for n in range(3)
    }
    values = {w: {f"rng@{w}": w} for w in range(4)}
    return built(writers_of(pieces, world_size=4, rank_values=values))


def test_every_changed_byte_of_a_register_is_found() -> None:
    manifest, data = small_step()
    opened(manifest, data).packs(None)
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        with pytest.raises(CorruptError, match=r"x\.register: the block of \d+ bytes at offset"):
            opened(manifest, bytes(bad)).packs(None)
        with pytest.raises(CorruptError, match=r"x\.register"):
            opened(manifest, bytes(bad)).check()


def test_a_register_that_is_cut_off_or_longer_is_found() -> None:
    manifest, data = small_step()
    for size in (0, 1, len(data) // 2, len(data) - 1, len(data) + 1):
        with pytest.raises(CorruptError, match=r"x\.register: \d+ bytes, .* load another step"):
            opened(manifest, (data + b"\0")[:size])
