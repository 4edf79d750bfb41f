"""Any region of any chunk arrives right: padded or not, compressed or not, in either version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np
import pytest
from doubles.checkpoints import Array, part_of, split_dim, write_checkpoint
from doubles.memory_store import MemoryStore
from exploring import examples
from fault_stores import using
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.checkpoints.catalog import open_step, step_folder
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format import manifest, unpack
from holdfast.ckpt.format.manifest import PackedChunk, PackIndex
from holdfast.ckpt.format.unpack import ChunkReader, Pack, ends_of
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.native import crc

SMALL_BLOCK = 64
KINDS = {"uint8": "|u1", "bfloat16": "<u2", "float32": "<f4", "complex128": "<c16"}
SHAPES = st.lists(st.integers(1, 40), max_size=3).map(tuple).filter(lambda s: prod(s) < 6000)
CODECS: tuple[dict[str, str], ...] = ({}, {}, {"*": "zstd:1"}, {"*": "blosc-lz4:3"})


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Let blocks have 64 bytes, so that small tensors have many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crc, "BLOCK_BYTES", SMALL_BLOCK)
        patch.setattr(manifest, "BLOCK_BYTES", SMALL_BLOCK)
        patch.setattr(unpack, "_SLAB_BYTES", 512)
        yield


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Draw a box of a shape that is not empty."""
    offset, extent = [], []
    for n in shape:
        low = draw(st.integers(0, n - 1))
        offset.append(low)
        extent.append(draw(st.integers(1, n - low)))
    return Box(offset=tuple(offset), shape=tuple(extent))


@dataclass(kw_only=True)
class Case:
    """A written tensor; ``whole`` has its values."""

    whole: Array
    store: MemoryStore
    index: PackIndex
    version: int
    run_bytes: int

    @property
    def name(self) -> str:
        return f"{step_folder(1)}/{self.index.pack}"

    def readers(self) -> Iterator[tuple[PackedChunk, ChunkReader]]:
        """Yield a reader of each chunk."""
        file = self.store.open(self.name)
        file.run_bytes = self.run_bytes
        opened = Pack(file, origin=self.name, ends=ends_of(self.index))
        tensor = self.index.tensors["w"]
        for chunk in tensor.chunks:
            as_old = self.version == 1 and not tensor.codec
            plain = msgspec.structs.replace(chunk, blocks=b"", crc64=None)
            yield chunk, ChunkReader(opened, "w", tensor, plain if as_old else chunk)
        opened.close()


@st.composite
def cases(draw: st.DrawFn) -> list[Case]:
    """Write a tensor and draw how it is read; return one case per writer."""
    shape = draw(SHAPES)
    dtype = draw(st.sampled_from(sorted(KINDS)))
    nbytes = prod(shape) * np.dtype(KINDS[dtype]).itemsize
    raw = np.random.default_rng(nbytes).integers(0, 256, nbytes).astype("u1")
    array = raw.view(KINDS[dtype]).reshape(shape)
    dim, parts = draw(st.integers(0, max(len(shape) - 1, 0))), draw(st.integers(1, 3))
    store = MemoryStore()
    with using(store):
        write_checkpoint(
            store.root,
            {"w": (array, dtype)},
            boxes={"w": split_dim(shape, parts=parts, dim=dim)},
            world_size=parts,
            compression=draw(st.sampled_from(CODECS)),
        )
    version, run_bytes = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 200, 1 << 20]))
    return [
        Case(whole=array, store=store, index=index, version=version, run_bytes=run_bytes)
        for index in open_step(store, 1)[1].values()
    ]


@settings(max_examples=examples(80), deadline=None)
@given(cases(), st.data())
def test_any_region_of_any_chunk_arrives(written: list[Case], data: st.DataObject) -> None:
    for case in written:
        for chunk, reader in case.readers():
            wanted = data.draw(st.lists(regions(chunk.box.shape), min_size=1, max_size=3))
            check(reader, part_of(case.whole, chunk.box), wanted)


@settings(max_examples=examples(60), deadline=None)
@given(cases(), st.data())
def test_no_region_arrives_damaged(written: list[Case], data: st.DataObject) -> None:
    for case in written:
        if bad := bytearray(case.store.read(case.name)):
            bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
            case.store.write(case.name, [bad])
        for chunk, reader in case.readers():
            whole = part_of(case.whole, chunk.box)
            with contextlib.suppress(CorruptError):
                check(reader, whole, [data.draw(regions(chunk.box.shape))])
            with contextlib.suppress(CorruptError):
                into = bytearray(chunk.nbytes)
                reader.read(memoryview(into))
                assert into == np.ascontiguousarray(whole).tobytes()


def check(reader: ChunkReader, whole: Array, wanted: Sequence[Box]) -> None:
    """Deliver ``wanted`` into arrays with strides; nothing beside them may be touched."""
    room = np.zeros((2 * len(wanted), *whole.shape), dtype=whole.dtype)
    targets = [
        (region, room[2 * number][tuple(slice(n) for n in region.shape) or ...])
        for number, region in enumerate(wanted)
    ]
    reader.deliver(targets)
    for region, target in targets:
        assert target.tobytes() == np.ascontiguousarray(part_of(whole, region)).tobytes()
        target[...] = 0
    assert not room.any()
