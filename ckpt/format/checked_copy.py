"""Copy of a chunk into its destination arrays with a check in the same pass, outside the GIL.

Memory is read once, and the check covers the stored bytes: adjacent bytes are checksummed as they
are copied; rows are checksummed in slabs that are still in the cache when they are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.geometry.scatter import Array, Delivery
from holdfast.ckpt.geometry.shard_index import Chunk
from holdfast.ckpt.native import isal
from holdfast.ckpt.native.crc import combine
from holdfast.ckpt.native.streaming import copy_run, copy_runs

BLOCK_BYTES: Final = 256 << 10


def copy_chunks(deliveries: Sequence[Delivery], parts: Sequence[memoryview]) -> list[int]:
    """Copy regions of several chunks as `copy_chunk` does; return the CRC32C of each chunk.

    ``parts`` are the chunks' bytes. Chunks that fill their arrays as they are stored are copied in
    one call, without the interpreter in between.
    """
    sums, whole, runs = [0] * len(parts), [], []
    for number, ((ref, regions), part) in enumerate(zip(deliveries, parts, strict=True)):
        target = regions[0][1]
        fills = len(regions) == 1 and target.nbytes == part.nbytes > 0
        if fills and target.flags.c_contiguous:
            whole.append(number)
            runs.append((isal.address_of(part), _address(target), part.nbytes))
        else:
            sums[number] = copy_chunk(ref.chunk, part, regions)
    if runs:
        copied = copy_runs(*np.array(runs, dtype=np.uint64).T)
        for number, crc in zip(whole, copied.tolist(), strict=True):
            sums[number] = crc
    return sums


def copy_chunk(chunk: Chunk, data: memoryview, regions: Sequence[tuple[Box, Array]]) -> int:
    """Copy regions of a chunk to their arrays; return the CRC32C of the whole chunk.

    ``data`` holds the chunk's bytes; each array has its region's shape and the elements' width.
    """
    if len(regions) == 1:
        region, target = regions[0]
        first, end = _span(region, chunk)
        if target.flags.c_contiguous and end - first == target.nbytes:
            return _copy_run(data, first, end, target)
    return _copy_rows(chunk, data, regions)


def _copy_run(data: memoryview, first: int, end: int, target: Array) -> int:
    """Copy bytes ``first … end``, which fill the target; checksum the bytes around them too."""
    copied = 0
    if end > first:
        copied = copy_run(isal.address_of(data) + first, _address(target), end - first)
    before = isal.crc32c(data[:first])
    return isal.crc32c(data[end:], combine(before, copied, end - first))


def _address(target: Array) -> int:
    return int(target.__array_interface__["data"][0])


def _copy_rows(chunk: Chunk, data: memoryview, regions: Sequence[tuple[Box, Array]]) -> int:
    """Walk the chunk by slabs of rows: checksum a slab, then copy the regions' rows out of it."""
    shape = chunk.box.shape
    kind = np.dtype((np.void, chunk.nbytes // chunk.box.size))
    rows = np.frombuffer(data, kind).reshape(shape)
    if not shape:
        for _, target in regions:
            np.copyto(target.view(kind), rows)
        return isal.crc32c(data)
    row_bytes = prod(shape[1:]) * kind.itemsize
    count = max(1, BLOCK_BYTES // row_bytes)
    value = 0
    for low in range(0, shape[0], count):
        high = min(low + count, shape[0])
        value = isal.crc32c(data[low * row_bytes : high * row_bytes], value)
        for region, target in regions:
            start = region.offset[0]
            a, b = max(low, start), min(high, start + region.shape[0])
            if a < b:
                part = rows[(slice(a, b), *region.slices[2:])]
                np.copyto(target[a - start : b - start].view(kind), part)
    return value


def _span(region: Box, chunk: Chunk) -> tuple[int, int]:
    """Return the bytes of the chunk from the first to the last element of ``region``."""
    first = last = 0
    for offset, extent, whole in zip(region.offset, region.shape, chunk.box.shape, strict=True):
        first, last = first * whole + offset, last * whole + offset + extent - 1
    width = chunk.nbytes // chunk.box.size
    return first * width, (last + 1) * width
