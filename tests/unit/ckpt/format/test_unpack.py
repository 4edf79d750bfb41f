"""Ranged reads of chunks: everything is verified, and no more than needed is read."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import msgspec
import numpy as np
import pytest
from doubles.checkpoints import About, Array, part_of, split_dim, write_checkpoint

from holdfast.ckpt.checkpoints.assemble import Assembler
from holdfast.ckpt.checkpoints.catalog import open_step, step_folder
from holdfast.ckpt.checkpoints.source import PackSource, StoreSource
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format.manifest import PackIndex
from holdfast.ckpt.format.unpack import ChunkReader, Pack, ends_of
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.scatter import ByChunk
from holdfast.ckpt.geometry.shard_index import ShardIndex
from holdfast.ckpt.native import crc
from holdfast.ckpt.store.local import LocalStore

BLOCK = crc.BLOCK_BYTES


def box(offset: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    return Box(offset=offset, shape=shape)


def source_of(root: Path, array: Array, dtype: str, **about: Unpack[About]) -> PackSource:
    write_checkpoint(root, {"w": (array, dtype)}, **about)
    return StoreSource(root, 1)


class Counting:
    """A source that counts the bytes it reads."""

    def __init__(self, source: PackSource) -> None:
        self._source, self.origin, self.read = source, source.origin, 0

    def indexes(self) -> Sequence[ShardIndex]:
        return self._source.indexes()

    def scatter(self, deliveries: ByChunk) -> int:
        read = self._source.scatter(deliveries)
        self.read += read
        return read


def counted(source: PackSource, wanted: Box) -> tuple[int, Array]:
    """Return the bytes read for a box of ``w``, and the box."""
    counting = Counting(source)
    found = Assembler(counting).box("w", wanted)
    return counting.read, found


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackSource, Array]:
    array = np.random.default_rng(1).standard_normal((6000, 1024)).astype("<f4")
    return source_of(tmp_path_factory.mktemp("big"), array, "float32"), array


@pytest.mark.parametrize(
    "rows", [(0, 6000), (0, 3000), (1500, 4500), (1000, 5903), (17, 4000), (5999 - 2500, 6000)]
)
def test_rows_of_a_big_tensor_cost_little_more_than_themselves(
    big: tuple[PackSource, Array], rows: tuple[int, int]
) -> None:
    source, array = big
    wanted = box((rows[0], 0), (rows[1] - rows[0], 1024))
    read, found = counted(source, wanted)
    np.testing.assert_array_equal(found, part_of(array, wanted))
    assert read <= 1.05 * found.nbytes


def test_a_few_rows_cost_the_blocks_they_touch(big: tuple[PackSource, Array]) -> None:
    source, array = big
    read, found = counted(source, box((77, 0), (1, 1024)))
    np.testing.assert_array_equal(found, array[77:78])
    assert read <= BLOCK
    read, _ = counted(source, box((63, 1020), (2, 4)))
    assert read <= 2 * BLOCK


def test_columns_of_long_rows_do_not_cost_whole_rows(tmp_path: Path) -> None:
    array = np.random.default_rng(2).integers(0, 99, (4, 3 << 20)).astype("|u1")
    source = source_of(tmp_path, array, "uint8")
    read, found = counted(source, box((0, 1 << 20), (4, 100)))
    np.testing.assert_array_equal(found, array[:, 1 << 20 : (1 << 20) + 100])
    assert read == 4 * BLOCK


def test_a_slab_in_the_midst_takes_bounded_room(tmp_path: Path) -> None:
    array = np.random.default_rng(2).integers(0, 99, (2, 3000, 2048)).astype("|u1")
    source = source_of(tmp_path, array, "uint8")
    wanted = box((0, 0, 0), (2, 3000, 2000))
    Assembler(source).box("w", box((0, 0, 0), (1, 1, 1)))
    tracemalloc.start()
    found = Assembler(source).box("w", wanted)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found, part_of(array, wanted))
    assert peak < found.nbytes + 10 * (4 << 20)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_edges_of_blocks(tmp_path: Path, extra: int) -> None:
    array = np.random.default_rng(3).integers(0, 256, 3 * BLOCK + extra).astype("|u1")
    source = source_of(tmp_path, array, "uint8")
    assembler = Assembler(source)
    edges = sorted({n + d for n in (0, BLOCK, 2 * BLOCK, 3 * BLOCK) for d in (-1, 0, 1)})
    for low in edges:
        for high in edges:
            if 0 <= low < high <= len(array):
                found = assembler.box("w", box((low,), (high - low,)))
                np.testing.assert_array_equal(found, array[low:high])


@pytest.mark.parametrize(
    ("dtype", "view"),
    [("complex128", "<c16"), ("float64", "<f8"), ("bfloat16", "<u2"), ("bool", "|b1")],
)
@pytest.mark.parametrize("shape", [(), (1,), (5, 1, 7), (300, 500)])
def test_elements_of_every_width(
    tmp_path: Path, dtype: str, view: str, shape: tuple[int, ...]
) -> None:
    size = int(np.prod(shape)) * np.dtype(view).itemsize
    raw = np.random.default_rng(4).integers(0, 2, size).astype("u1")
    array = raw.view(view).reshape(shape)
    source = source_of(tmp_path, array, dtype)
    found = Assembler(source).box("w")
    assert (found.shape, found.tobytes()) == (shape, array.tobytes())
    if len(shape) == 2:
        part = Assembler(source).box("w", box((100, 3), (50, 400)))
        assert part.tobytes() == np.ascontiguousarray(array[100:150, 3:403]).tobytes()


def readers(root: Path) -> dict[str, tuple[PackIndex, Pack]]:
    store, folder = LocalStore(root), step_folder(1)
    _, packs = open_step(store, 1)
    return {
        index.pack: (
            index,
            Pack(store.open(f"{folder}/{index.pack}"), origin=index.pack, ends=ends_of(index)),
        )
        for index in packs.values()
    }


@pytest.mark.parametrize("compression", [{}, {"*": "zstd"}, {"*": "blosc-lz4"}])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_flipped_bit_of_a_chunk_is_noticed_and_its_place_named(
    tmp_path: Path, compression: dict[str, str], dim: int
) -> None:
    array = np.arange(70, dtype="<i4").reshape(7, 10)
    boxes = {"w": split_dim((7, 10), parts=3, dim=dim)}
    write_checkpoint(
        tmp_path, {"w": (array, "int32")}, boxes=boxes, world_size=3, compression=compression
    )
    for path, (index, pack) in readers(tmp_path).items():
        place = tmp_path / step_folder(1) / path
        good = place.read_bytes()
        tensor = index.tensors["w"]
        for at in range(len(good)):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            place.write_bytes(bad)
            for chunk in tensor.chunks:
                with pytest.raises(CorruptError, match=rf"{path}: tensor w: the chunk .* offset"):
                    ChunkReader(pack, "w", tensor, chunk).read(memoryview(bytearray(chunk.nbytes)))
        place.write_bytes(good)
        pack.close()


def test_a_flip_is_named_by_its_block_and_read_ranges_elsewhere_are_not_hurt(
    tmp_path: Path,
) -> None:
    array = np.random.default_rng(5).integers(0, 256, 5 * BLOCK + 9).astype("|u1")
    source = source_of(tmp_path, array, "uint8")
    (pack,) = (tmp_path / "step-000000000001/data").iterdir()
    rng = random.Random(0)
    for _ in range(20):
        at = rng.randrange(len(array))
        bad = bytearray(array.tobytes())
        bad[at] ^= 1 << rng.randrange(8)
        with pack.open("r+b") as file:
            file.seek(at)
            file.write(bad[at : at + 1])
        first = at // BLOCK * BLOCK
        with pytest.raises(CorruptError, match=f"offset {first} "):
            Assembler(source).box("w")
        with pytest.raises(CorruptError, match=f"offset {first} "):
            Assembler(source).box("w", box((at,), (1,)))
        other = (at + 2 * BLOCK) % len(array) // BLOCK * BLOCK
        np.testing.assert_array_equal(
            Assembler(source).box("w", box((other,), (9,))), array[other : other + 9]
        )
        with pack.open("r+b") as file:
            file.seek(at)
            file.write(array[at : at + 1].tobytes())


def test_a_store_that_reads_at_odd_sizes_changes_nothing(tmp_path: Path) -> None:
    array = np.random.default_rng(6).integers(0, 256, 3 * BLOCK + 5).astype("|u1")
    source_of(tmp_path, array, "uint8")
    for index, pack in readers(tmp_path).values():
        tensor = index.tensors["w"]
        for run_bytes in (1, 1000, BLOCK - 1, BLOCK + 1, 3 * BLOCK):
            pack.file.run_bytes = run_bytes
            into = bytearray(array.nbytes)
            ChunkReader(pack, "w", tensor, tensor.chunks[0]).read(memoryview(into))
            assert into == array.tobytes()


def test_a_chunk_of_version_1_is_read_whole_and_checked(tmp_path: Path) -> None:
    array = np.random.default_rng(7).integers(0, 256, (2, BLOCK)).astype("|u1")
    source_of(tmp_path, array, "uint8")
    for index, pack in readers(tmp_path).values():
        tensor = index.tensors["w"]
        old = msgspec.structs.replace(tensor.chunks[0], blocks=b"", crc64=None)
        target = np.empty((2, 10), dtype="u1")
        reader = ChunkReader(pack, "w", tensor, old)
        assert reader.deliver([(box((0, 5), (2, 10)), target)]) >= array.nbytes
        np.testing.assert_array_equal(target, array[:, 5:15])
        wrong = msgspec.structs.replace(old, crc32c=old.crc32c ^ 1)
        with pytest.raises(CorruptError, match="was damaged"):
            ChunkReader(pack, "w", tensor, wrong).deliver([(box((0, 5), (2, 10)), target)])


def test_a_compressed_chunk_that_unpacks_to_other_bytes_is_noticed(tmp_path: Path) -> None:
    """The stored checksum is right, the data behind it is another's."""
    array = np.arange(1000, dtype="<i4")
    source_of(tmp_path, array, "int32", compression={"*": "zstd"})
    for index, pack in readers(tmp_path).values():
        tensor = index.tensors["w"]
        wrong = msgspec.structs.replace(tensor.chunks[0], crc32c=tensor.chunks[0].crc32c ^ 1)
        into = memoryview(bytearray(4000))
        with pytest.raises(CorruptError, match="was damaged"):
            ChunkReader(pack, "w", tensor, wrong).read(into)


def test_a_file_that_ends_early_says_where(tmp_path: Path) -> None:
    array = np.random.default_rng(8).integers(0, 256, 3 * BLOCK).astype("|u1")
    source = source_of(tmp_path, array, "uint8")
    (pack,) = (tmp_path / "step-000000000001/data").iterdir()
    with pack.open("r+b") as file:
        file.truncate(BLOCK + 3)
    with pytest.raises(CorruptError, match=r"tensor w: needs .* the file ends"):
        Assembler(source).box("w", box((2 * BLOCK,), (1,)))
    assert Assembler(source).box("w", box((3,), (1,)))[0] == array[3]
