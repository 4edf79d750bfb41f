"""A shard's index: it survives a round trip, and damage is reported by name."""

from __future__ import annotations

import pytest

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.shard_index import (
    Chunk,
    ShardIndex,
    TensorEntry,
    decode_index,
    encode_index,
)


def make_index() -> ShardIndex:
    chunk = Chunk(box=Box(offset=(0, 2), shape=(4, 2)), at=64, nbytes=32, crc32c=7)
    return ShardIndex(
        run="r",
        generation=1,
        step=3,
        writer=0,
        world_size=2,
        payload_bytes=96,
        tensors={"model.w": TensorEntry(dtype="float32", shape=(4, 4), chunks=(chunk,))},
        values={"sampler.cursor": 5},
        aliases={"model.head": "model.w"},
    )


def test_an_index_survives_its_bytes() -> None:
    index = make_index()
    assert decode_index(encode_index(index), origin="here") == index


def test_every_chunk_is_listed_with_its_tensor() -> None:
    (ref,) = make_index().chunks()
    assert (ref.fqn, ref.writer, ref.dtype, ref.chunk.at) == ("model.w", 0, "float32", 64)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data.replace(b'"at":64', b'"at":"x"'), "at"),
        (lambda data: data.replace(b'"run":"r",', b""), "run"),
        (lambda data: data.replace(b'"format":1', b'"format":99'), "99"),
        (lambda data: b"\xff" + data, "slot 3"),
    ],
)
def test_a_damaged_index_names_its_origin_and_field(damage, named: str) -> None:
    with pytest.raises(CorruptError, match="slot 3") as caught:
        decode_index(damage(encode_index(make_index())), origin="slot 3")
    assert named in str(caught.value)
