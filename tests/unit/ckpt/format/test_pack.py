"""Packs: the content matches its description, once, and nothing wrong is published."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
from checkpoint_states import files_of
from doubles.checkpoints import (
    Array,
    part_of,
    sample_arrays,
    shard,
    split_dim,
    write_checkpoint,
)
from doubles.memory_store import MemoryStore
from fault_stores import using

from holdfast.ckpt.checkpoints import commit
from holdfast.ckpt.checkpoints.catalog import load_index, load_manifest, open_step, step_folder
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format import pack
from holdfast.ckpt.format.manifest import CRC_BYTES, PackIndex, stored_bytes
from holdfast.ckpt.format.unpack import ends_of
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.shard_index import Chunk, ShardIndex, TensorEntry
from holdfast.ckpt.native import isal

FOLDER = step_folder(1)


def written(
    arrays: Mapping[str, tuple[Array, str]], **options: Mapping[str, str]
) -> tuple[MemoryStore, PackIndex]:
    with using(store := MemoryStore()):
        write_checkpoint("", arrays, **options)  # type: ignore[arg-type]
    (record,) = load_manifest(store, FOLDER).writers
    return store, load_index(store, FOLDER, record)


@pytest.mark.parametrize("compression", [{}, {"*": "zstd"}, {"model.*": "blosc-lz4"}])
def test_every_byte_of_a_pack_is_accounted_for(compression: dict[str, str]) -> None:
    store, index = written(sample_arrays(), compression=compression)
    data = store.read(f"{FOLDER}/{index.pack}")
    (record,) = load_manifest(store, FOLDER).writers
    assert (len(data), isal.crc32c(data)) == (record.pack.nbytes, record.pack.crc32c)
    ends, covered = ends_of(index), 0
    for fqn, tensor in index.tensors.items():
        array = sample_arrays()[fqn][0]
        for chunk in tensor.chunks:
            end = chunk.at + stored_bytes(chunk, tensor)
            body, tail = data[chunk.at : end], data[end : ends[chunk.at]]
            assert chunk.at % 64 == 0
            assert int.from_bytes(tail[:CRC_BYTES], "little") == isal.crc32c(body)
            assert not any(tail[CRC_BYTES:])
            assert len(tail) < CRC_BYTES + 64
            covered += len(body) + len(tail)
            raw = np.ascontiguousarray(part_of(array, chunk.box)).tobytes()
            assert isal.crc32c(raw) == chunk.crc32c
            if tensor.codec is None and not chunk.padded:
                assert body == raw
    assert covered == len(data)


def test_the_order_of_threads_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are prepared by threads that finish in any order; the pack is the same."""
    array = np.random.default_rng(0).integers(0, 256, (40, 100_000)).astype("u1")
    monkeypatch.setattr("holdfast.ckpt.geometry.grid.PIECE_BYTES", 300_000)
    first, _ = written({"w": (array, "uint8")})
    slow = threading.Lock()
    real = pack._prepare

    def prepare(piece: pack.ChunkPiece, *args: object, **options: object) -> object:
        if piece.start % 3 == 0:
            with slow:
                isal.crc32c(array.data)
        return real(piece, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pack, "_prepare", prepare)
    second, _ = written({"w": (array, "uint8")})
    assert first._files == second._files


def test_nothing_prepared_ahead_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, _ = written(sample_arrays())
    monkeypatch.setattr(pack, "_AHEAD_PIECES", 1)
    store, _ = written(sample_arrays())
    assert store._files == usual._files


def broken_shard(fault: str) -> tuple[ShardIndex, bytes]:
    arrays = sample_arrays()
    boxes = {fqn: split_dim(a.shape, parts=1) for fqn, (a, _) in arrays.items()}
    index, payload = shard(arrays, boxes, writer=0, world_size=1)
    if fault == "changed":
        last = max(c.at for t in index.tensors.values() for c in t.chunks)
        return index, payload[:last] + bytes([payload[last] ^ 4]) + payload[last + 1 :]
    return index, payload[:-60]


@pytest.mark.parametrize("fault", ["changed", "short"])
def test_memory_that_is_not_what_was_captured_is_not_published(fault: str) -> None:
    index, payload = broken_shard(fault)
    with using(store := MemoryStore()), pytest.raises(CorruptError, match=r"writer 0: tensor .*"):
        commit.write_pack("", step=1, index=index, payload=memoryview(payload))
    assert files_of(store) == set()


def test_a_payload_of_the_wrong_size_is_refused() -> None:
    entry = TensorEntry(
        dtype="int32",
        shape=(4,),
        chunks=(Chunk(box=Box(offset=(0,), shape=(4,)), at=0, nbytes=16, crc32c=0),),
    )
    index = ShardIndex(
        run="", generation=0, step=1, writer=0, world_size=1, payload_bytes=16, tensors={"w": entry}
    )
    writer = pack.PackWriter(index, lambda _: bytes(12), verify=False)
    with pytest.raises(CorruptError, match="are 12 bytes, not 16"):
        list(writer.parts())


def test_what_breaks_in_a_thread_reaches_the_saver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> bytes:
        raise MemoryError("no room")

    monkeypatch.setattr("holdfast.ckpt.format.codecs.encode", fails)
    array = np.zeros((3, 1 << 17), dtype="u1")
    with using(store := MemoryStore()), pytest.raises(MemoryError):
        write_checkpoint("", {"w": (array, "uint8")}, compression={"*": "zstd"})
    assert files_of(store) == set()


def test_an_unchanged_chunk_is_known_by_all_that_it_is() -> None:
    """Same bytes under another type, shape, codec or box are written again."""
    base = {"w": (np.arange(24, dtype="<i4"), "int32")}
    with using(store := MemoryStore()):
        write_checkpoint("", base, step=1)
        cases: dict[int, dict[str, tuple[Array, str]]] = {
            2: base,
            3: {"w": (np.arange(24, dtype="<i4").view("<u4"), "uint32")},
            4: {"w": (np.arange(24, dtype="<i4").reshape(4, 6), "int32")},
            5: {"v": (np.arange(24, dtype="<i4"), "int32")},
            6: {"w": (np.arange(24, dtype="<i4")[::-1], "int32")},
        }
        for step, arrays in cases.items():
            write_checkpoint("", arrays, step=step, base=1)
        write_checkpoint("", base, step=7, base=1, compression={"*": "zstd"})
        write_checkpoint("", base, step=8, base=7, compression={"*": "zstd"})
        write_checkpoint("", base, step=9, base=7)
    shared = [step for step in range(2, 10) if load_manifest(store, step_folder(step)).bases()]
    assert shared == [2, 8]


def test_a_forged_checksum_does_not_pass_for_the_same_bytes() -> None:
    """Two chunks with one CRC32C: the second polynomial tells them apart."""
    first = np.zeros(64, dtype="u1")
    second = first.copy()
    second[:5] = list((1 | 0x82F63B78 << 1).to_bytes(5, "little"))
    with using(store := MemoryStore()):
        write_checkpoint("", {"w": (first, "uint8")}, step=1)
        write_checkpoint("", {"w": (second, "uint8")}, step=2, base=1)
    packs = [open_step(store, step)[1][0].tensors["w"].chunks[0] for step in (1, 2)]
    assert packs[0].crc32c == packs[1].crc32c
    assert packs[0].crc64 != packs[1].crc64
    assert packs[1].base is None
    assert msgspec.structs.replace(packs[1], crc64=None) == msgspec.structs.replace(
        packs[0], crc64=None
    )
