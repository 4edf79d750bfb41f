"""Differences between saved and wanted state are listed, with what to do about them."""

from __future__ import annotations

from unittest import mock

import pytest

from holdfast.ckpt.errors import CorruptError, MismatchError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.geometry.reshard import SavedChunks, plan
from holdfast.ckpt.geometry.shard_index import Chunk, ChunkRef, ShardIndex, TensorEntry
from holdfast.ckpt.geometry.spans import covers


def spec(fqn: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(fqn=fqn, dtype=dtype, shape=shape)


def whole(*shape: int) -> Box:
    return Box(offset=(0,) * len(shape), shape=shape)


def index(
    writer: int, tensors: dict[str, TensorEntry], aliases: dict[str, str] | None = None
) -> ShardIndex:
    return ShardIndex(
        run="r",
        generation=1,
        step=1,
        writer=writer,
        world_size=1,
        payload_bytes=0,
        tensors=tensors,
        aliases=aliases or {},
    )


def entry(box: Box, *shape: int, at: int = 0) -> TensorEntry:
    chunk = Chunk(box=box, at=at, nbytes=box.size * 4, crc32c=0)
    return TensorEntry(dtype="float32", shape=shape, chunks=(chunk,))


def test_all_kinds_of_differences_are_named_with_the_remedy() -> None:
    have = [index(0, {f: entry(whole(2), 2) for f in ("a", "b", "c", "old")})]
    want = {
        "a": (spec("a", 3), (whole(3),)),
        "b": (spec("b", 2, dtype="bfloat16"), (whole(2),)),
        "c": (spec("c", 2), (whole(2),)),
        "new": (spec("new", 2), (whole(2),)),
    }
    with pytest.raises(MismatchError) as caught:
        plan(have, want)
    message = str(caught.value)
    assert "4 differences" in message
    assert "a is float32 [3], saved is float32 [2]" in message
    assert "b is bfloat16 [2], saved is float32 [2]" in message
    assert "missing: new" in message
    assert "extra: old" in message
    assert 'strict="ignore"' in message


def test_without_strict_only_what_both_have_is_copied() -> None:
    have = [index(0, {f: entry(whole(2), 2) for f in ("a", "old")})]
    want = {f: (spec(f, 2), (whole(2),)) for f in ("a", "new")}
    assert [copy.fqn for copy in plan(have, want, strict=False).copies] == ["a"]


def test_a_tied_name_is_read_from_where_it_is_stored() -> None:
    have = [index(0, {"embed": entry(whole(2), 2)}, {"head": "embed"})]
    want = {f: (spec(f, 2), (whole(2),)) for f in ("embed", "head")}
    reshard = plan(have, want)
    assert [(copy.fqn, copy.ref.fqn) for copy in reshard.copies] == [
        ("embed", "embed"),
        ("head", "embed"),
    ]
    assert len(reshard.refs()) == 1
    assert reshard.bytes == 8


def test_writers_that_contradict_each_other_are_corrupt() -> None:
    have = [index(0, {"a": entry(whole(2), 2)}), index(1, {"a": entry(whole(3), 3)})]
    with pytest.raises(CorruptError, match="writer 1 saved"):
        plan(have, {})


def in_rows(ranks: int, rows: int, names: list[str]) -> tuple[list[ShardIndex], tuple[int, int]]:
    """Return what ``ranks`` writers hold of tensors of which each has ``rows`` rows."""
    shape = (ranks * rows, 8)
    have = [
        index(
            r,
            {
                f: entry(Box(offset=(r * rows, 0), shape=(rows, 8)), *shape, at=i * 128)
                for i, f in enumerate(names)
            },
        )
        for r in range(ranks)
    ]
    return have, shape


def test_a_rank_of_a_large_world_looks_at_no_chunk_that_it_does_not_need() -> None:
    names = [f"t{i}" for i in range(10)]
    have, shape = in_rows(2048, 4, names)
    box = Box(offset=(1001, 0), shape=(33, 8))
    want = {f: (spec(f, *shape), (box,)) for f in names}
    saved = SavedChunks(have)
    with mock.patch("holdfast.ckpt.geometry.reshard.ChunkRef", wraps=ChunkRef) as made:
        copies = plan(saved, want).copies
    assert len(copies) == made.call_count == 10 * len({(1001 + i) // 4 for i in range(33)})
    assert copies == plan(have, want).copies


def test_chunks_are_checked_once_however_often_they_are_planned_with() -> None:
    have, shape = in_rows(64, 4, ["t"])
    saved = SavedChunks(have)
    with mock.patch("holdfast.ckpt.geometry.reshard.covers", wraps=covers) as check:
        for row in range(5):
            box = Box(offset=(row, 0), shape=(7, 8))
            assert plan(saved, {"t": (spec("t", *shape), (box,))}).copies
    assert check.call_count == 1


def test_a_plan_says_what_it_costs() -> None:
    have, shape = in_rows(3, 4, ["t"])
    box = Box(offset=(2, 0), shape=(4, 8))
    found = plan(have, {"t": (spec("t", *shape), (box,))}).describe()
    assert found.wanted_bytes == 4 * 8 * 4
    assert found.needed_bytes == {0: 128, 1: 128}
    assert found.excess == 2
    assert str(found) == (
        "2 copies out of 2 chunks of 2 writers: 128 bytes wanted, 256 in these chunks (2.00 ×), "
        "at most 128 of one writer"
    )
    assert str(plan(have, {}, strict=False).describe()).startswith("0 copies")
