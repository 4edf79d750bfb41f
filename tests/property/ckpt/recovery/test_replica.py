"""A replica follows every snapshot that it is shown, and reads only the changed chunks."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from holdfast.ckpt.errors import NotFoundError, PeerError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.scatter import ByChunk
from holdfast.ckpt.geometry.shard_index import Chunk, ShardIndex, TensorEntry
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.recovery.replica import Replica, digest, refresh

ROWS, COLUMNS = 12, 2


class Snapshot:
    """Tensors in memory, cut along dim 0 and dealt out to two writers."""

    origin = "a test"

    def __init__(self, tensors: dict[str, torch.Tensor], cuts: Sequence[int]) -> None:
        self.parts: dict[int, bytes] = {}
        entries: list[dict[str, TensorEntry]] = [{}, {}]
        for name, tensor in tensors.items():
            ends = [*sorted({*cuts}), len(tensor)]
            chunks: list[list[Chunk]] = [[], []]
            for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                data = tensor[start:end].numpy().tobytes()
                at = sum(map(len, self.parts.values()))
                self.parts[at] = data
                box = Box(offset=(start, 0), shape=(end - start, COLUMNS))
                chunks[number % 2].append(
                    Chunk(box=box, at=at, nbytes=len(data), crc32c=crc32c(data))
                )
            for writer in (0, 1):
                entries[writer][name] = TensorEntry(
                    dtype="float32", shape=tuple(tensor.shape), chunks=tuple(chunks[writer])
                )
        self._indexes = [
            ShardIndex(
                run="r",
                generation=1,
                step=1,
                writer=writer,
                world_size=2,
                payload_bytes=0,
                tensors=entries[writer],
                aliases={"tied": "w"},
            )
            for writer in (0, 1)
        ]
        self.fails_after: int | None = None

    def indexes(self) -> list[ShardIndex]:
        return self._indexes

    def read(self, refs: object) -> object:
        raise AssertionError("it is scattered")

    def scatter(self, deliveries: ByChunk) -> int:
        total = 0
        for number, (ref, regions) in enumerate(deliveries):
            if number == self.fails_after:
                raise PeerError("gone in the middle")
            for box, array in regions:
                whole = np.frombuffer(self.parts[ref.chunk.at], dtype=array.dtype)
                array[...] = whole.reshape(ref.chunk.box.shape)[box.slices]
            total += ref.chunk.nbytes
        return total


def tensors_of(values: Sequence[int]) -> dict[str, torch.Tensor]:
    column = torch.tensor(values, dtype=torch.float32)[:, None]
    return {"v": column.expand(-1, COLUMNS).contiguous(), "w": (column + 1) @ torch.ones(1, 2)}


CUTS = st.lists(st.integers(1, ROWS - 1), max_size=4)
STATES = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=ROWS, max_size=ROWS), CUTS, st.booleans()),
    min_size=1,
    max_size=5,
)


@given(states=STATES)
def test_a_replica_follows_whatever_is_changed_cut_otherwise_or_fails(
    states: list[tuple[list[int], list[int], bool]],
) -> None:
    replica = Replica()
    for values, cuts, fails in states:
        wanted = tensors_of(values)
        source = Snapshot(wanted, cuts)
        total = sum(map(len, source.parts.values()))
        if fails:
            source.fails_after = 1
            try:
                refresh(replica, source, ["v", "tied"])
            except PeerError:
                source.fails_after = None
        took = refresh(replica, source, ["v", "tied"])
        assert took.read_bytes + took.kept_bytes == total
        assert torch.equal(replica.tensors["v"], wanted["v"])
        assert torch.equal(replica.tensors["tied"], wanted["w"])
        assert refresh(replica, source, ["v", "tied"]).read_bytes == 0


@given(before=st.lists(st.integers(0, 1), min_size=ROWS, max_size=ROWS), row=st.integers(0, 11))
def test_of_one_row_that_changed_the_chunks_that_have_it_are_read(
    before: list[int], row: int
) -> None:
    replica, cuts = Replica(), [3, 6, 9]
    refresh(replica, Snapshot(tensors_of(before), cuts), ["v"])
    after = [value + (place == row) for place, value in enumerate(before)]
    first, second = Snapshot(tensors_of(before), cuts), Snapshot(tensors_of(after), cuts)
    took = refresh(replica, second, ["v"])
    assert (took.read_bytes, took.kept_bytes) == (3 * 8, 9 * 8)
    assert digest(first.indexes(), ["v"]) != digest(second.indexes(), ["v"])
    assert digest(first.indexes(), ["v"]) == digest(first.indexes()[::-1], ["v"])


def test_a_name_that_was_not_saved_is_named() -> None:
    source = Snapshot(tensors_of([0] * ROWS), [])
    for ask in (
        lambda: refresh(Replica(), source, ["other"]),
        lambda: digest(source.indexes(), ["other"]),
    ):
        with pytest.raises(NotFoundError, match="no tensor other was saved"):
            ask()
