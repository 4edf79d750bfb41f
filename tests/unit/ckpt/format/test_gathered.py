"""Regions that are read together are those that are read one by one, and as well checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from doubles.checkpoints import Array, part_of, split_dim, write_checkpoint

from holdfast.ckpt.checkpoints.assemble import Assembler
from holdfast.ckpt.checkpoints.catalog import open_step, step_folder
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format import gathered
from holdfast.ckpt.format.gathered import GatheredReads
from holdfast.ckpt.format.unpack import ChunkReader, Pack, ends_of
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.native import checked_read, crc
from holdfast.ckpt.store.local import LocalStore

BLOCK = crc.BLOCK_BYTES

pytestmark = pytest.mark.skipif(checked_read.pieces_kernel() is None, reason="not compiled")


def written(root: Path, arrays: dict[str, Array], *, parts: int) -> list[list[ChunkReader]]:
    """Write arrays, split along dim 0; return the readers of each pack."""
    write_checkpoint(
        root,
        {name: (array, array.dtype.name) for name, array in arrays.items()},
        boxes={name: split_dim(array.shape, parts=parts) for name, array in arrays.items()},
        world_size=parts,
    )
    store, found = LocalStore(root), []
    for index in open_step(store, 1)[1].values():
        file = store.open(f"{step_folder(1)}/{index.pack}")
        pack = Pack(file, origin=index.pack, ends=ends_of(index))
        found.append(
            [
                ChunkReader(pack, name, tensor, chunk)
                for name, tensor in index.tensors.items()
                for chunk in tensor.chunks
            ]
        )
    return found


def read(calls: GatheredReads, *, limit_bytes: int = BLOCK) -> int:
    """Read all that was gathered, in many parts; return the bytes read."""
    return sum(part.read() for part in calls.parts(limit_bytes))


def gathering(reader: ChunkReader) -> GatheredReads:
    made = GatheredReads.of(reader.pack)
    assert made is not None
    return made


@pytest.mark.parametrize("seed", range(6))
def test_regions_of_many_chunks_arrive_and_cost_no_more_than_alone(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(gathered, "_ROW_BYTES", (1 + seed % 3) * BLOCK)
    arrays: dict[str, Array] = {  # that of 4 rows is padded at the last writer
        "rows": rng.standard_normal((7, 40_000)).astype("<f4"),
        "line": rng.integers(0, 256, 3 * BLOCK + 77).astype("|u1"),
        "few": rng.standard_normal((4, 10)).astype("<f4"),
        "one": rng.standard_normal((3, 1)).astype("<f8"),
    }
    for readers in written(tmp_path, arrays, parts=3):
        calls, alone, wanted = gathering(readers[0]), 0, []
        for reader in readers:
            box, whole = reader._chunk.box, arrays[reader._fqn]
            first = int(rng.integers(0, box.shape[0]))
            count = int(rng.integers(1, box.shape[0] - first + 1))
            for low, size in ((0, box.shape[0]), (first, count)):
                region = Box(
                    offset=(low, *(0 for _ in box.shape[1:])), shape=(size, *box.shape[1:])
                )
                room, other = (np.zeros(region.shape, dtype=whole.dtype) for _ in range(2))
                assert calls.add(reader, [(region, room)])
                alone += reader.deliver([(region, other)])
                wanted.append((room, part_of(part_of(whole, box), region)))
        assert (
            sum(part.nbytes for _, part in wanted) <= read(calls, limit_bytes=seed * BLOCK) <= alone
        )
        for room, part in wanted:
            np.testing.assert_array_equal(room, part)


def test_regions_that_are_no_run_of_bytes_are_left_to_others(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((8, 9)).astype("<f4")
    ((reader,),) = written(tmp_path, {"w": array}, parts=1)
    calls, all_of_it = gathering(reader), Box(offset=(0, 0), shape=(8, 9))
    columns = Box(offset=(0, 1), shape=(8, 4))
    assert not calls.add(reader, [(columns, np.empty((8, 4), dtype="<f4"))])
    apart = np.empty((8, 18), dtype="<f4")[:, ::2]
    assert not calls.add(reader, [(all_of_it, apart)])
    fixed = np.empty((8, 9), dtype="<f4")
    fixed.flags.writeable = False
    assert not calls.add(reader, [(all_of_it, fixed)])
    room = np.empty((8, 9), dtype="<f4")
    assert not calls.add(reader, [(all_of_it, room), (columns, apart[:, :4])])
    assert read(calls) == 0


@pytest.mark.parametrize("parts", [1, 3])
def test_every_flipped_byte_of_whole_chunks_is_noticed_and_its_tensor_named(
    tmp_path: Path, parts: int
) -> None:
    arrays: dict[str, Array] = {
        "w": np.arange(40, dtype="<i4").reshape(4, 10),
        "v": np.arange(5, dtype="<i8"),
    }
    for readers in written(tmp_path, arrays, parts=parts):
        place = tmp_path / step_folder(1) / readers[0].pack.origin
        good = place.read_bytes()
        for at in range(len(good)):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            place.write_bytes(bad)
            calls = gathering(readers[0])
            for reader in readers:
                box = reader._chunk.box
                room = np.empty(box.shape, dtype=arrays[reader._fqn].dtype)
                whole = Box(offset=(0,) * len(box.shape), shape=box.shape)
                assert calls.add(reader, [(whole, room)])
            with pytest.raises(CorruptError, match=r"tensor [vw]: the chunk .* offset"):
                read(calls)
        place.write_bytes(good)


@pytest.mark.parametrize("block", range(5))
def test_a_flipped_byte_of_a_piece_that_was_cut_is_noticed_at_its_block(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "_ROW_BYTES", 2 * BLOCK)
    array = np.random.default_rng(3).integers(0, 256, 4 * BLOCK + 9).astype("|u1")
    ((reader,),) = written(tmp_path, {"w": array}, parts=1)
    with (tmp_path / step_folder(1) / reader.pack.origin).open("r+b") as file:
        file.seek(block * BLOCK + 5)
        file.write(bytes([array[block * BLOCK + 5] ^ 1]))
    calls, room = gathering(reader), np.empty_like(array[3:])
    assert calls.add(reader, [(Box(offset=(3,), shape=room.shape), room)])
    with pytest.raises(CorruptError, match=rf"damaged at or after offset {block * BLOCK} "):
        read(calls)


def test_a_file_that_ends_early_is_named_with_the_tensor_that_needs_more(tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 256, 3 * BLOCK).astype("|u1")
    ((reader,),) = written(tmp_path, {"w": array}, parts=1)
    calls, room = gathering(reader), np.empty(9, dtype="u1")
    for at in (0, 2 * BLOCK):
        assert calls.add(reader, [(Box(offset=(at,), shape=(9,)), room)])
    with (tmp_path / step_folder(1) / reader.pack.origin).open("r+b") as file:
        file.truncate(2 * BLOCK + 3)
    wanted = rf"tensor w: needs {BLOCK} bytes at offset {2 * BLOCK}, the file ends after 3"
    with pytest.raises(CorruptError, match=wanted):
        read(calls)


def test_a_library_without_the_call_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {"w": np.random.default_rng(2).standard_normal((300, 700)).astype("<f4")}
    written(tmp_path, arrays, parts=2)
    monkeypatch.setattr("holdfast.ckpt.store.base.pieces_kernel", lambda: None)
    with StoreSource(tmp_path, 1) as source:
        assert GatheredReads.of(source._reader(next(source.indexes()[0].chunks())).pack) is None
        np.testing.assert_array_equal(Assembler(source).box("w"), arrays["w"])
