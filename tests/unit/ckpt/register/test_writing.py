"""A register is refused where its writers contradict each other, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from doubles.registers import Pieces, built, opened, writers_of

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format.codecs import Codec
from holdfast.ckpt.format.manifest import PackIndex, WriterRecord
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.register.records import BLOCK_RECORDS

Writers = list[tuple[WriterRecord, PackIndex]]


def rows(writers: int, *, each: int = 2) -> Pieces:
    boxes = [(w, Box(offset=(w * each,), shape=(each,))) for w in range(writers)]
    return {"weight": ((writers * each,), boxes), "none": ((0, 3), [])}


def with_tensor(index: PackIndex, **changes: object) -> PackIndex:
    tensor = msgspec.structs.replace(index.tensors["weight"], **changes)
    return msgspec.structs.replace(index, tensors=index.tensors | {"weight": tensor})


def doubled(writers: Writers) -> None:
    record, index = writers[1]
    chunks = writers[0][1].tensors["weight"].chunks
    writers[1] = record, with_tensor(index, chunks=chunks)


def without(writers: Writers) -> None:
    record, index = writers[1]
    writers[1] = record, with_tensor(index, chunks=())


def of_another_type(writers: Writers) -> None:
    record, index = writers[1]
    writers[1] = record, with_tensor(index, dtype="int8")


def compressed(writers: Writers) -> None:
    record, index = writers[1]
    writers[1] = record, with_tensor(index, codec=Codec(name="zstd", level=3))


def of_another_step(writers: Writers) -> None:
    record, index = writers[1]
    writers[1] = record, msgspec.structs.replace(index, step=8)


def unaligned(writers: Writers) -> None:
    record, index = writers[1]
    chunks = tuple(msgspec.structs.replace(c, at=c.at + 1) for c in index.tensors["weight"].chunks)
    writers[1] = record, with_tensor(index, chunks=chunks)


def with_the_value_of_another(writers: Writers) -> None:
    for number in (0, 1):
        record, index = writers[number]
        writers[number] = record, msgspec.structs.replace(index, rank_values={"rng@3": number})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (doubled, r"tensor weight of shape \(8,\): .*nothing was committed: save again"),
        (without, r"tensor weight of shape \(8,\): 6 of 8 elements"),
        (of_another_type, "tensor weight: writer 1 has int8"),
        (compressed, "tensor weight: its writers compressed it in different ways"),
        (of_another_step, "index of writer 1 is of run, step, generation and world size"),
        (unaligned, "writer 1 has chunks that are not at multiples of 64"),
        (with_the_value_of_another, "two writers have a value rng of one rank"),
    ],
)
def test_writers_that_contradict_each_other_are_refused(
    change: Callable[[Writers], None], said: str
) -> None:
    writers = writers_of(rows(4), world_size=4)
    change(writers)
    with pytest.raises(CorruptError, match=f"^a made-up step: .*{said}"):
        built(writers)


def test_tensors_are_described_with_their_cells() -> None:
    manifest, _ = built(writers_of(rows(4), world_size=4))
    assert manifest.tensors["weight"].cell == (2,)
    assert manifest.tensors["none"].cell == (1, 3)


def test_the_order_of_writers_does_not_matter() -> None:
    writers = writers_of(rows(9), world_size=9)
    assert built(writers) == built(writers[::-1])


def test_a_reader_of_one_box_reads_one_block_of_its_tensor() -> None:
    count = 40 * BLOCK_RECORDS
    manifest, data = built(writers_of(rows(count), world_size=count))
    register = opened(manifest, data)
    before = register.bytes_read
    (packs,) = [register.packs({"weight": [((2000,), (2004,))]})]
    assert sorted(packs) == [1000, 1001]
    assert register.bytes_read - before < len(data) / 8
    assert before < 1000


def test_ranges_of_ranks_are_listed_in_few_numbers() -> None:
    values = {w: {f"rng@{w}": w} for w in (0, 1, 2, 5, 7, 8)}
    manifest, data = built(writers_of(rows(9), world_size=9, rank_values=values))
    assert opened(manifest, data).ranks == {"rng": ((0, 3), (5, 6), (7, 9))}
