"""Checkpoints from numpy arrays, in any layout, without torch: for tests of the format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from holdfast.ckpt.checkpoints.commit import (
    MANY_WRITERS,
    PackOptions,
    WriterReceipt,
    commit,
    write_pack,
)
from holdfast.ckpt.geometry.grid import common_grid
from holdfast.ckpt.geometry.layout import Box, chunk_range
from holdfast.ckpt.geometry.shard_index import Chunk, ShardIndex, TensorEntry
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.types import Json

Array: TypeAlias = npt.NDArray[Any]


def split_dim(shape: tuple[int, ...], *, parts: int, dim: int = 0) -> list[Box]:
    """Return the boxes of FSDP2's split of ``dim``; a scalar lies at the first rank."""
    if not shape:
        return [Box(offset=(), shape=())]
    boxes = []
    for rank in range(parts):
        start, extent = chunk_range(shape[dim], parts=parts, index=rank)
        offset, size = [0] * len(shape), list(shape)
        offset[dim], size[dim] = start, extent
        boxes.append(Box(offset=tuple(offset), shape=tuple(size)))
    return boxes


def part_of(array: Array, box: Box) -> Array:
    """Return a box of an array."""
    return array[box.slices]


class About(TypedDict, total=False):
    """The options of a test's checkpoint; the others have defaults."""

    run: str
    step: int
    generation: int
    values: Mapping[str, Json]
    aliases: Mapping[str, str]
    with_grids: bool
    compression: Mapping[str, str]
    base: int | None
    register_from: int


def shard(
    arrays: Mapping[str, tuple[Array, str]],
    boxes: Mapping[str, Sequence[Box]],
    *,
    writer: int,
    world_size: int,
    **about: Unpack[About],
) -> tuple[ShardIndex, bytes]:
    """Return the shard of one writer of ``arrays`` (view and torch dtype); one box per rank."""
    payload = bytearray()
    tensors = {}
    for fqn, (array, dtype) in arrays.items():
        chunks = []
        for box in boxes[fqn][writer : writer + 1]:
            data = np.ascontiguousarray(part_of(array, box)).tobytes()
            if data:
                chunk = Chunk(box=box, at=len(payload), nbytes=len(data), crc32c=crc32c(data))
                chunks.append(chunk)
                payload += data + bytes(-len(data) % 64)
        grid = common_grid(array.shape, boxes[fqn]) if about.get("with_grids", True) else None
        tensors[fqn] = TensorEntry(dtype=dtype, shape=array.shape, chunks=tuple(chunks), grid=grid)
    leader = writer == 0
    index = ShardIndex(
        run=about.get("run", "test"),
        generation=about.get("generation", 1),
        step=about.get("step", 1),
        writer=writer,
        world_size=world_size,
        payload_bytes=len(payload),
        tensors=tensors,
        values=dict(about.get("values", {})) if leader else {},
        rank_values={"rank": writer},
        aliases=dict(about.get("aliases", {})) if leader else {},
    )
    return index, bytes(payload)


def write_checkpoint(
    root: str | Path,
    arrays: Mapping[str, tuple[Array, str]],
    *,
    boxes: Mapping[str, Sequence[Box]] | None = None,
    world_size: int = 1,
    **about: Unpack[About],
) -> list[WriterReceipt]:
    """Write and commit a checkpoint, by default split along dim 0; return the receipts."""
    lie = boxes or {fqn: split_dim(a.shape, parts=world_size) for fqn, (a, _) in arrays.items()}
    options = PackOptions(compression=about.get("compression", {}), base=about.get("base"))
    receipts = []
    for writer in range(world_size):
        index, payload = shard(arrays, lie, writer=writer, world_size=world_size, **about)
        view = memoryview(payload)
        step = index.step
        receipts.append(write_pack(root, step=step, index=index, payload=view, options=options))
    commit(
        root,
        run=index.run,
        step=index.step,
        generation=index.generation,
        receipts=receipts,
        mesh={"dp": world_size},
        register_from=about.get("register_from", MANY_WRITERS),
    )
    return receipts


def sample_arrays(seed: int = 0) -> dict[str, tuple[Array, str]]:
    """Return small arrays of many dtypes and awkward shapes."""
    rng = np.random.default_rng(seed)
    return {
        "model.weight": (rng.standard_normal((10, 7)).astype("<f4"), "float32"),
        "model.bias": (rng.integers(0, 1 << 16, (5,)).astype("<u2"), "bfloat16"),
        "model.tiny": (rng.integers(0, 256, (1, 3)).astype("|u1"), "float8_e4m3fn"),
        "model.mask": (rng.integers(0, 2, (9,)).astype("|b1"), "bool"),
        "model.phase": (
            (rng.standard_normal((4, 2)) + 1j * rng.standard_normal((4, 2))).astype("<c8"),
            "complex64",
        ),
        "model.none": (np.empty((0, 3), dtype="<f4"), "float32"),
        "optimizer.step": (np.array(7.0 + seed, dtype="<f8"), "float64"),
        "cursor/odd name%": (rng.integers(-9, 9, (3, 2, 4)).astype("<i8"), "int64"),
    }
